"""The parser of all commands but `run`: argparse, with errors of one line and the kinds of value of `run`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NoReturn

from phalanx.errors import UsageError
from phalanx.job.command_line import take_words
from phalanx.job.config import Sources
from phalanx.job.environment import variables
from phalanx.job.options import BY_DEST, METAVARS
from phalanx.job.units import READERS

TRUST = ("token_file", "tls_cert", "tls_key", "tls_ca")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of two in the help."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy(action)
        shown.option_strings = [flag for flag in action.option_strings if "_" not in flag]
        return super()._format_action_invocation(shown)


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        about = "\n".join(textwrap.fill(line, 79) for line in description.splitlines())
        super().__init__(
            prog=f"phalanx {command}", description=about, epilog=epilog, formatter_class=_Formatter
        )

    def error(self, message: str) -> NoReturn:
        """Refuse, in the words of `phalanx run`: `--timeout soon: not a duration`."""
        raise UsageError(message.removeprefix("argument "))

    def add_flag(self, flags: str, help: str) -> None:
        """An option without a value."""
        self.add_argument(*flags.split(), action="store_true", help=help)

    def add_value(
        self,
        flags: str,
        kind: str | Callable[[str], Any],
        help: str,
        *,
        least: float = 0,
        default: Any = None,
        **more: Any,
    ) -> None:
        """An option whose value is of a kind that `phalanx run` knows, too, or is read by a function."""
        if isinstance(kind, str):
            more.setdefault("metavar", METAVARS.get(kind))
        self.add_argument(*flags.split(), type=_reader(kind, least), default=default, help=help, **more)

    def add_run_options(self, *dests: str, variable: bool = True) -> None:
        """Options of `phalanx run`; with their variables as defaults, or only as far as they are given."""
        for option in (BY_DEST[dest] for dest in dests):
            default = variables().get(option.env or "", "") or option.default or ""
            shown = " [%(default)s]" if default and variable else ""
            self.add_argument(
                *option.flags,
                metavar=option.metavar,
                default=default if variable else argparse.SUPPRESS,
                help=f"{option.help}{shown}",
            )

    def parse_job(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The words of a command that describes a job: an action, with options; `run`'s; the script's."""
        own, rest, run = list(words[:1]), list(words[1:]), list[str]()
        while rest and rest[0].startswith("-") and rest[0] != "--":
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if not name.startswith("--") and len(name) > 2 and name[:2] in self._option_string_actions:
                name, equals, value = name[:2], "=", word[2:]  # -N4
            action = self._option_string_actions.get(name.replace("_", "-"))
            if action is None:
                run += take_words(word, rest)
            elif not equals and (not rest or action.nargs in (0, "?")):
                own.append(word)
            else:  # in one word, because the value may begin with a dash
                own.append(f"{action.option_strings[-1]}={value if equals else rest.pop(0)}")
        return self.parse_args(own), run, rest[1:] if rest[:1] == ["--"] else rest


def sources(options: argparse.Namespace, dests: Sequence[str], environ: Mapping[str, str]) -> Sources:
    """The options of `run` that were given, and the variables, as `run` reads them."""
    given = {dest: value for dest, value in vars(options).items() if dest in dests}
    return Sources(given, environ)


def _reader(kind: str | Callable[[str], Any], least: float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = READERS[kind](text) if isinstance(kind, str) else kind(text)
            if kind in ("int", "duration") and not least <= value < float("inf"):
                raise ValueError(f"must be {least:g} or more")
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None
        return value

    return read
