"""`phalanx completion SHELL`: a completion script, written by shtab from the argparse parsers.

The scripts are self-contained: pressing Tab starts no Python. Only the dashed spelling of an option is
offered; both would double every list.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from phalanx.cli import COMMANDS
from phalanx.job.command_line import usage_error
from phalanx.job.options import SHELLS

_VALUES = {"nproc_per_node": ["auto", "gpu", "xpu", "cpu"], "rdzv_backend": ["phalanx", "static", "etcd"]}
_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca", "journal", "training_script", "training_script_args")
_USAGE = f"""\
usage: phalanx completion {"|".join(SHELLS)}

bash:  eval "$(phalanx completion bash)"
zsh:   phalanx completion zsh > DIRECTORY/_phalanx, in a directory of $fpath
fish:  phalanx completion fish | source
tcsh:  phalanx completion tcsh > FILE, then source FILE
"""


def main(argv: Sequence[str]) -> int:
    """Print the script."""
    if list(argv) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        given = " ".join(argv) or "no shell"
        raise usage_error(f"{given}: name one shell, one of {', '.join(SHELLS)}")
    print(script(argv[0]))
    return 0


def script(shell: str) -> str:
    """The completion script for a shell."""
    import shtab

    text: str = shtab.complete(_parser(), shell)
    return text


def _parser() -> argparse.ArgumentParser:
    """The whole command as one parser; it is never used to parse."""
    from phalanx.cli.drain import _parser as drain
    from phalanx.cli.quarantine import make_parser as quarantine
    from phalanx.cli.store import _parser as store
    from phalanx.job.config import get_args_parser

    run = get_args_parser({})
    run.add_argument("--print-completion", choices=SHELLS, help="print a completion script")
    run.add_argument("--version", action="store_true", help="print the version")
    own: dict[str, argparse.ArgumentParser] = {
        "run": run,
        "store": store(),
        "drain": drain(),
        "quarantine": quarantine(),
    }
    top = argparse.ArgumentParser(prog="phalanx")
    top.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = top.add_subparsers()
    for name, (_, about) in COMMANDS.items():
        parents = [own[name]] if name in own else []
        parser = commands.add_parser(name, help=about, parents=parents, add_help=name not in own)
        if name == "completion":
            parser.add_argument("shell", choices=SHELLS)
        elif name == "help":
            parser.add_argument("command", choices=list(COMMANDS))
        for action in parser._actions:
            _describe(action)
    return top


def _describe(action: Any) -> None:
    """Set the values or files that complete an argument, and drop the underscored spelling."""
    import shtab

    action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    action.choices = action.choices or _VALUES.get(action.dest)
    if action.dest in _FILES:
        action.complete = shtab.FILE
    elif action.dest == "log_dir":
        action.complete = shtab.DIRECTORY
