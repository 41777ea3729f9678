"""Help texts and the reference page, written from the table of options."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from phalanx.cli import COMMANDS, GROUPS, PUBLIC
from phalanx.core.exit_codes import TABLE
from phalanx.job.command_line import usage_error
from phalanx.job.options import OPTIONS, SECTIONS, Option
from phalanx.job.units import format_duration

WIDTH = 80
_INDENT = 30

EXAMPLES = """\
Examples:
  phalanx run --nproc-per-node gpu train.py --lr 0.1
      one worker for each GPU of this machine
  phalanx run --nproc-per-node 8 --max-restarts 3 -t 3 --log-dir logs train.py
      eight workers, up to three restarts, output kept in files as well
  phalanx run --nnodes 2:4 --rdzv-backend phalanx --rdzv-endpoint node0:29400 \\
      --rdzv-id job7 --nproc-per-node gpu -m package.train
      the same line on two to four machines
"""

NOTES = """\
Any option may be spelled with _ for - and shortened while it stays unique. A
variable sets a default: PET_NNODES=2 is --nnodes 2 and PHALANX_GRACE=5m is
--grace 5m. What follows the script belongs to the script.

TIME is 30, 30s, 10m, 1h30m or 1d; SIZE 512M or 2GiB; RANKS 0,3-7.
"""

ABOUT = """\
Starts the script once for each worker of this node, gives every worker its
ranks in the environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and others,
as torchrun does), and watches all of them. When a worker fails, it stops the
others, prints the root cause, and starts the group again while --max-restarts
allows it. With --nnodes, the same line is run on every machine.

Standard output belongs to the workers; the launcher writes to standard error:
a line at the start, one for each incident, one at the end, and the report of a
failure last.
"""

EXIT_CODES = """\
The exit codes of all commands, and in brackets what a scheduler should do.
"""

SEE_ALSO = """\
phalanx status       the state of the jobs on this machine
phalanx check        whether this machine, and the way to others, is fit
"""


def main(argv: Sequence[str]) -> int:
    """`phalanx help [COMMAND | exit-codes | schema [NAME]]`."""
    topic = argv[0] if argv and argv[0] not in ("-h", "--help") else ""
    if topic == "--version":
        from phalanx import __version__

        print(f"phalanx {__version__}")
        return 0
    if topic == "exit-codes":
        print("\n".join([EXIT_CODES, *_exit_codes()]))
        return 0
    if topic == "schema":
        return _print_schema(argv[1:])
    if topic and topic not in COMMANDS:
        raise usage_error(f"{topic}: no such command; there are {', '.join(PUBLIC)}")
    if topic == "run":
        if "--short" in argv:
            print(run_help(), end="")
        elif "--all" in argv:
            print(manual(), end="")
        else:
            _show(manual())
    elif topic and topic != "help":
        return _own_help(topic)
    else:
        print(overview(), end="")
    return 0


def _print_schema(names: Sequence[str]) -> int:
    from phalanx.observe.schemas import TYPES, schema

    if len(names) > 1 or not TYPES.keys() >= set(names):
        raise usage_error(f"schema {' '.join(names)}: choose one of {', '.join(TYPES)}")
    listed = (f"{name:<12} {title}" for name, (title, _) in TYPES.items())
    print(schema(names[0]) if names else "\n".join(listed), end="" if names else "\n")
    return 0


def _own_help(command: str) -> int:
    """The help that a command other than run prints itself."""
    from importlib import import_module

    try:
        code: int = import_module(COMMANDS[command][0]).main(["--help"])
    except SystemExit as leaving:  # argparse leaves this way after printing
        return int(leaving.code or 0)
    return code


def overview() -> str:
    """The text of `phalanx --help`."""
    lines = ["usage: phalanx COMMAND ...", "", "Runs a group of workers as one unit."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12} {about}" for name, (_, about) in group.items())]
    lines += ["", "phalanx help COMMAND explains a command, phalanx help exit-codes the exit codes;"]
    lines += ["phalanx --version prints the version."]
    return "\n".join(lines) + "\n"


def run_help() -> str:
    """The text of `phalanx run --help`: examples, then the options that most jobs need."""
    lines = ["usage: phalanx run [options] SCRIPT [arguments of the script]", "", EXAMPLES.rstrip()]
    for title, options in _groups():
        lines += ["", f"{title}:"]
        lines += [line for option in options if option.common for line in _entry(option, option.help)]
    rest = sum(not option.common for option in OPTIONS)
    more = f"--help-all shows {rest} more; phalanx help run is the manual, with the exit codes."
    return "\n".join([*lines, "", NOTES, more, ""])


def manual() -> str:
    """The text of `phalanx run --help-all` and `phalanx help run`: the page of a manual."""
    listed: list[str] = []
    for title, options in _groups():
        listed += ["", title] if listed else [title]
        for option in options:
            listed += _entry(option, f"{option.help} {_source(option)}".rstrip())
    sections = {
        "NAME": ["phalanx run - run a script as a group of workers"],
        "SYNOPSIS": ["phalanx run [options] SCRIPT [arguments of the script]"],
        "DESCRIPTION": ABOUT.splitlines(),
        "OPTIONS": [*NOTES.splitlines(), "", *listed],
        "EXIT STATUS": _exit_codes(),
        "EXAMPLES": [line[2:] for line in EXAMPLES.splitlines()[1:]],
        "SEE ALSO": SEE_ALSO.splitlines(),
    }
    lines: list[str] = []
    for title, body in sections.items():
        lines += [title, *(f"  {line}".rstrip() for line in body), ""]
    return "\n".join(lines)


def _show(text: str) -> None:
    """Through the pager on a terminal, as a manual page."""
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        import pydoc

        pydoc.pager(text)
    else:
        print(text, end="")


def _exit_codes() -> list[str]:
    lines: list[str] = []
    for code, meaning, advice in TABLE:
        about = f"{meaning.replace('`', '')} [{advice}]"
        wrapped = textwrap.wrap(about, WIDTH - 24 - 2, break_on_hyphens=False)
        lines += [f"  {code if i == 0 else '':<22}{line}" for i, line in enumerate(wrapped)]
    return lines


def _groups() -> list[tuple[str, tuple[Option, ...]]]:
    return [(section.rows[0].group, section.rows) for section in SECTIONS]


def _spelled(option: Option) -> str:
    short = [flag for flag in option.flags if len(flag) == 2]
    names = ", ".join([*short, option.name])
    return names if option.kind == "flag" else f"{names} {option.metavar}"


def _default(option: Option) -> str:
    """The default as a user would write it; empty: there is none."""
    if option.kind == "flag" or option.default in (None, "", ()):
        return ""
    for word, value in option.words.items():
        if value is not None and value == option.default:
            return word
    return format_duration(option.default) if option.kind == "duration" else str(option.default)


def _source(option: Option) -> str:
    """The variable and the default, in brackets."""
    known = [option.env or "", _default(option)]
    return f"[{': '.join(filter(None, known))}]" if any(known) else ""


def _entry(option: Option, about: str) -> list[str]:
    left = f"  {_spelled(option)}"
    # Break between words only, so that a list such as SIGTERM,SIGINT,… can be copied.
    wrapped = textwrap.wrap(about, WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    if len(left) > _INDENT - 2:
        return [left, *(" " * _INDENT + line for line in wrapped)]
    return [left.ljust(_INDENT) + wrapped[0], *(" " * _INDENT + line for line in wrapped[1:])]


REFERENCE = """\
# Options of `phalanx run`

This page is written from the table of options in `src/phalanx/job/options.py` (`make options`).

`phalanx run [options] SCRIPT [arguments of the script]`. An empty variable counts as unset. Options of
torchrun have its names, variables and defaults; ours have variables that begin with `PHALANX_`. Each may be
spelled with `_` for `-`, and shortened while it stays unique.

| value | written as |
|---|---|
| TIME | `30`, `30s`, `10m`, `1.5h`, `1h30m`, `7d` |
| SIZE | `4096`, `512M`, `2GiB`, in units of 1024 |
| RANKS | `0,3-7` |
| [HOST:]PORT | `8080`, `0.0.0.0:8080`, `[::1]:8080` |
| SIGNAL | `SIGUSR1` or `USR1` |

A file beside the script may hold the same options, `phalanx.toml` or `pyproject.toml`: a command line
overrides a variable, a variable the file, and the file what a scheduler says. `--dry-run` shows where each
value comes from.

```toml
# phalanx.toml; in pyproject.toml the table is [tool.phalanx.run]
[run]
nproc-per-node = "gpu"
max-restarts = 3
grace = "2m"
verbose = true
preload = ["transformers", "datasets"]
```

The file is as trusted as the script. With `-m` it is looked for in the current directory. Python 3.10 needs
the package `tomli` to read it.
"""


def reference() -> str:
    """The text of docs/options.md."""
    lines = [REFERENCE]
    for title, options in _groups():
        lines += [f"## {title}", "", "| option | what it does | variable | default |", "|---|---|---|---|"]
        for option in options:
            cells = (f"`{_spelled(option)}`", option.help, option.env, _default(option))
            code = [cells[0], cells[1], *(f"`{cell}`" if cell else "" for cell in cells[2:])]
            lines.append(f"| {' | '.join((cell or '').replace('|', chr(92) + '|') for cell in code)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
