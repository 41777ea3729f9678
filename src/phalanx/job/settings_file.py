"""Options of `phalanx run` in a file beside the script: `phalanx.toml`, or a table of `pyproject.toml`.

    # phalanx.toml                       # pyproject.toml
    [run]                                [tool.phalanx.run]
    nproc-per-node = "gpu"               nproc-per-node = "gpu"
    grace = "2m"                         grace = "2m"

A variable overrides the file, and an argument both. A value is what the option takes on a command line; a
flag is true or false, and a list may be one. The file is as trusted as the script that it lies beside.
"""

from __future__ import annotations

import os
from importlib import import_module

from phalanx.job.command_line import usage_error
from phalanx.job.options import BY_DEST, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


PLACES = (("phalanx.toml", ("run",)), ("pyproject.toml", ("tool", "phalanx", "run")))
_NOT_IN_A_FILE = ("help", "help_all", "print_completion", "version")


def read_settings(directory: str) -> tuple[str, dict[str, str]]:
    """The name of the file that applies, and its values by option, as a variable would hold them."""
    for name, place in PLACES:
        path = os.path.join(directory, name)
        table = _table(path, place)
        if table:
            return name, _values(path, table)
    return "", {}


def _table(path: str, place: tuple[str, ...]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        raise usage_error(f"{path}: {error.strerror}") from None
    if b"phalanx" not in data and len(place) > 1:
        return {}  # most projects
    found: Any = _loads(path, data)
    for name in place:
        found = found.get(name, {}) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise usage_error(f"{path}: {'.'.join(place)} is not a table; write [{'.'.join(place)}]")
    return found


def _loads(path: str, data: bytes) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # Python 3.10 has none of its own
        try:
            toml = import_module(name)
        except ImportError:
            continue
        try:
            found: dict[str, Any] = toml.loads(data.decode())
        except ValueError as error:  # of TOML, or of the encoding
            raise usage_error(f"{path}: {error}") from None
        return found
    raise usage_error(
        f"{path}: this Python reads no TOML; pip install tomli, or use variables such as PET_NNODES"
    )


def _values(path: str, table: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in table.items():
        option = BY_DEST.get(key.replace("-", "_"))
        if option is None or option.dest in _NOT_IN_A_FILE:
            import difflib

            names = [option.name[2:] for option in BY_DEST.values()]
            near = difflib.get_close_matches(key.replace("_", "-"), names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise usage_error(f"{path}: {key}: no such option{hint}")
        found[option.dest] = _text(path, option, value)
    return found


def _text(path: str, option: Option, value: Any) -> str:
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise usage_error(f"{path}: {option.name[2:]} = {value!r}: write true or false")
        return "1" if value else "0"
    several = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in several):
        raise usage_error(f"{path}: {option.name[2:]} = {value!r}: write text or a number")
    if option.kind == "list":
        return ",".join(
            str(one).replace(",", ",,") if isinstance(value, list) else str(one) for one in several
        )
    return ",".join(map(str, several))
