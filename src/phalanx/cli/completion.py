"""`phalanx completion SHELL`: a completion script, written by shtab from the argparse parsers.

The scripts are self-contained: pressing Tab starts no Python. Only the dashed spelling of an option is
offered; both would double every list.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from phalanx.cli import COMMANDS
from phalanx.cli.parser import Parser
from phalanx.job.options import BY_DEST, SHELLS

_HOW = """\
bash:  eval "$(phalanx completion bash)"
zsh:   phalanx completion zsh > DIRECTORY/_phalanx, in a directory of $fpath
fish:  phalanx completion fish | source
tcsh:  phalanx completion tcsh > FILE, then source FILE
"""


def main(argv: Sequence[str]) -> int:
    """Print the script."""
    print(script(make_parser().parse_args(argv).shell))
    return 0


def make_parser() -> Parser:
    """The argument."""
    parser = Parser("completion", "Print a completion script for a shell.", epilog=_HOW)
    parser.add_argument("shell", choices=SHELLS)
    return parser


def script(shell: str) -> str:
    """The completion script for a shell."""
    import shtab

    text: str = shtab.complete(_parser(), shell)
    return text


def _parser() -> argparse.ArgumentParser:
    """The whole command as one parser; it is never used to parse."""
    top = argparse.ArgumentParser(prog="phalanx")
    top.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = top.add_subparsers()
    for name, (module, about) in COMMANDS.items():
        parents = [_run()] if name == "run" else []
        if hasattr(import_module(module), "make_parser"):
            parents = [import_module(module).make_parser()]
        parser = commands.add_parser(name, help=about, parents=parents, add_help=not parents)
        if name == "help":
            parser.add_argument("command", choices=[*COMMANDS, "exit-codes", "schema"])
        for action in parser._actions:
            _describe(action)
    return top


def _run() -> argparse.ArgumentParser:
    from phalanx.job.config import get_args_parser

    parser = get_args_parser({})
    for dest in ("version", "help_all"):
        parser.add_argument(*BY_DEST[dest].flags, help=BY_DEST[dest].help, action="store_true")
    return parser


def _describe(action: Any) -> None:
    """Set the values or files that complete an argument, and drop the underscored spelling."""
    import shtab

    action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    if action.dest in BY_DEST:
        action.choices = action.choices or list(BY_DEST[action.dest].words) or None
    if action.metavar == "FILE" or action.dest.startswith("training_script"):
        action.complete = shtab.FILE
    elif action.metavar == "DIR":
        action.complete = shtab.DIRECTORY
