"""Lines of Phalanx's own: on stderr, or through logging where the program has set it up.

Such a line may quote another process, user or host. Characters that a terminal obeys are shown as escapes.
With `--log-format json` every line is one JSON object (agent/logs/json_lines.py).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.logs.json_lines import JsonLines

_objects: JsonLines | None = None
_PREFIX = "phalanx: "


def printable(text: str) -> str:
    """The text without characters that a terminal obeys; only line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def use_format(name: str, host: str) -> None:
    """Write lines as `text` or as `json` from now on."""
    global _objects
    _objects = None
    if name == "json":
        from phalanx.agent.logs.json_lines import JsonLines

        _objects = JsonLines(host, None, "phalanx")


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return _objects is not None


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write to stderr; a closed or full stderr is not a reason to fail. `styled`: made safe, with colours."""
    if _objects is not None:
        lines = (line.removeprefix(_PREFIX) for line in text.splitlines() if line.strip())
        text, styled = _objects.of_lines(lines), True
    try:
        if sys.stderr is not None:
            sys.stderr.write(text if styled else printable(text))
            sys.stderr.flush()
    except (OSError, ValueError):
        pass


def warn(message: str) -> None:
    """A warning. Without a handler, logging would print the bare text, like a line of the workers' output."""
    import logging  # late: it is not on the way to the first worker

    logger = logging.getLogger("phalanx")
    if logger.hasHandlers():
        logger.warning("%s", printable(message))
    else:
        write_stderr(f"phalanx: {message}\n")
