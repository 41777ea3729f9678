"""The `phalanx` command: finds the command's module, and turns what it raises into an exit code.

Every command is a module with `main(argv) -> int`, imported only when it is used. The rules common to all
commands live here: bad usage is one line on stderr and exit code 2, a failure one line and exit code 1, help
goes to stdout, an interrupt is 130, a closed pipe (`phalanx logs | head`) or a full disk ends the command
without a traceback.
"""

from __future__ import annotations

import io
import sys

from phalanx.log import write_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# The parts of --help: name → (module, what it is for).
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "run": ("phalanx.cli.run", "run a script as a group of workers, like torchrun"),
    },
    "Look": {
        "status": ("phalanx.cli.status", "show the jobs on this machine; finished ones, a live view"),
        "logs": ("phalanx.cli.logs", "show the output of a run's workers, or its events"),
        "stacks": ("phalanx.cli.stacks", "show the Python stacks of all ranks of a running job"),
    },
    "Act": {
        "stop": ("phalanx.cli.stop", "stop a running job on all its nodes"),
        "restart": ("phalanx.cli.restart", "restart the workers of a running job"),
        "drain": ("phalanx.cli.drain", "let a node leave a running job"),
        "quarantine": ("phalanx.cli.quarantine", "keep hosts out of a running job, or let them in"),
    },
    "Prepare": {
        "check": ("phalanx.cli.check", "test machines, the network between them, and the store"),
        "store": ("phalanx.cli.store", "serve the store that the nodes of jobs meet at"),
        "warm": ("phalanx.cli.warm", "show what --warm-for left behind, and what is preloaded"),
    },
    "Platforms": {
        "slurm": ("phalanx.cli.slurm", "submit jobs to Slurm, and show them"),
        "k8s": ("phalanx.cli.k8s", "print the Kubernetes manifests of a job"),
    },
}
HIDDEN: dict[str, tuple[str, str]] = {
    "completion": ("phalanx.cli.completion", "print a completion script for bash, zsh, fish or tcsh"),
    "help": ("phalanx.cli.help", "explain a command: phalanx help run"),
}
PUBLIC = {name: command for group in GROUPS.values() for name, command in group.items()}
COMMANDS = PUBLIC | HIDDEN

USAGE = 2
_UNWRITABLE = (5, 27, 28, 122)  # EIO, EFBIG, ENOSPC, EDQUOT: how a write to stdout can fail


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the value is the exit code of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        from phalanx.cli.help import overview

        write_stderr(overview())
        return USAGE
    first = words[0]
    if first in COMMANDS:
        return invoke(first, words[1:])
    if first in ("-h", "--help"):
        return invoke("help", words[1:])
    if first in ("-V", "--version"):
        return invoke("help", ["--version"])
    return complain("", _unknown_command(first))


def invoke(command: str, argv: Sequence[str]) -> int:
    """Run a command's `main` under the rules common to all commands."""
    from phalanx.job.command_line import InformationRequested
    from phalanx.job.environment import namespace

    try:
        namespace()
    except ValueError as error:
        return complain(command, str(error))
    if command != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not be able to show a letter
    try:
        # Not importlib.import_module, which would be one more module to load.
        module = COMMANDS[command][0]
        __import__(module)
        code: int = sys.modules[module].main(list(argv))
        if command != "run":
            sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except InformationRequested as asked:
        if asked.what == "completion":
            return invoke("completion", [asked.value])
        how = {"version": ["--version"], "help": [command, "--short"], "help_all": [command, "--all"]}
        return invoke("help", how[asked.what])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if command == "run":
            raise  # the pipe may be another one than stdout
        _abandon_stdout()
        return 141  # 128 + SIGPIPE, as a shell shows it
    except Exception as error:
        from phalanx.errors import PhalanxError, UsageError

        if isinstance(error, UsageError):
            return complain(command, str(error))
        if command == "run":
            raise
        line = str(error)
        if not isinstance(error, PhalanxError):  # first: some of these are OSErrors as well
            if not isinstance(error, OSError) or error.filename is not None or error.errno not in _UNWRITABLE:
                raise
            _abandon_stdout()
            line = f"cannot write to stdout: {error.strerror}"
        write_stderr(f"phalanx {command}: {line}\n")
        return 1


def complain(command: str, message: str) -> int:
    """One line about bad usage on stderr; returns the exit code."""
    line = " ".join(message.splitlines())
    write_stderr(f"phalanx{' ' * bool(command)}{command}: {line}\n")
    return USAGE


def _abandon_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's last flush does not fail again."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _unknown_command(word: str) -> str:
    import difflib
    import os

    if word.startswith("-") or word.endswith(".py") or os.path.isfile(word):
        return f"{word}: no such command; to start a script write: phalanx run {word} ..."
    near = difflib.get_close_matches(word, COMMANDS, 1, 0.6)
    if near:
        return f"{word}: no such command; did you mean phalanx {near[0]}?"
    return f"{word}: no such command; there are {', '.join(PUBLIC)}"
