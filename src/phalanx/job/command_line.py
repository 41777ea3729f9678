"""The words of a command line against the table of options: which are options, which belong to the script.

Invariants:
- scanning stops at the first positional word; it and everything after it belong to the script, untouched;
- an option may be shortened as long as the rest names one option (argparse's rule, except that the two
  spellings of one option do not make it ambiguous);
- the scanner reads words, never their meaning: values are read in `phalanx.job.config`.

`phalanx run` itself does not use argparse. Importing it and building a parser costs more than everything
else that happens before the workers are started, and its messages cannot name a variable or suggest a flag.
"""

from __future__ import annotations

from phalanx.job.options import BY_DEST, OPTIONS, SHELLS

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` for it would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.errors import UsageError
    from phalanx.job.options import Option

ON = "on"
"""The value of an option whose value is left out."""

# Options of other launchers, too different from these names for a spelling suggestion.
_ELSEWHERE = {
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--np": "--nproc-per-node",
    "--num-processes": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--num-machines": "--nnodes",
    "--num-nodes": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-port": "--master-port",
    "--main-process-ip": "--master-addr",
    "--run-id": "--rdzv-id",
    "--timeout": "--shutdown-timeout",
}
_BY_FLAG: dict[str, Option] = {flag: option for option in OPTIONS for flag in option.flags}


class InformationRequested(Exception):
    """The command line asks for help, the version or a completion script."""

    def __init__(self, what: str, value: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.value = value


class Scan:
    """The words of argv: raw values, the script, and its arguments."""

    __slots__ = ("script", "script_args", "values")

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.script: str | None = None
        self.script_args: tuple[str, ...] = ()


def peek(argv: Sequence[str], dest: str, environ: Mapping[str, str]) -> str:
    """What a command line that is refused says for an option, as far as that can be told."""
    option = BY_DEST[dest]
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in option.flags:
            return value if equals else following
    return environ.get(option.env or "", "")


def usage_error(message: str) -> UsageError:
    """The error, imported here: a valid command line does not pay for the exception tree."""
    from phalanx.errors import UsageError

    return UsageError(message)


def scan(argv: Sequence[str]) -> Scan:
    """Split argv into options, script and script arguments; raise `UsageError` on words it cannot place."""
    found = Scan()
    rest = list(argv)
    position = 0
    while position < len(rest):
        word = rest[position]
        position += 1
        if word == "--":
            break
        if not _is_option(word):
            position -= 1
            break
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:
            position = _scan_cluster(found, word, rest, position)
            continue
        option = find_option(name)
        if option.kind == "flag":
            if equals:
                raise usage_error(f"{word}: {option.name} takes no value; write {option.name} alone")
            value = "1"
        elif option.kind == "page" and not equals:
            value = ON
            if position < len(rest) and is_address(rest[position]):
                value = rest[position]
                position += 1
        elif not equals:
            value = _take_value(option, rest, position)
            position += 1
        _store(found, option, value)
    if position < len(rest):
        found.script = rest[position]
        found.script_args = tuple(rest[position + 1 :])
    return found


def take_words(word: str, rest: list[str]) -> list[str]:
    """An option of `run` as another command passes it on: the word, and its value if that is the next one."""
    name, equals, _ = word.partition("=")
    kind = find_option(name).kind
    if equals or kind == "flag" or (kind == "page" and not (rest and is_address(rest[0]))):
        return [word]
    if not rest:
        raise usage_error(f"{name} needs a value")
    return [word, rest.pop(0)]


def _scan_cluster(found: Scan, word: str, rest: list[str], position: int) -> int:
    """Short options written together: -r3, -mt1, -mr 3."""
    letters = word[1:]
    while letters:
        option = _BY_FLAG.get("-" + letters[0])
        if option is None:
            raise _unknown(word)
        letters = letters[1:]
        if option.kind == "flag":
            _store(found, option, "1")
            continue
        value = letters.removeprefix("=")
        if not letters:
            value = _take_value(option, rest, position)
            position += 1
        _store(found, option, value)
        break
    return position


def _store(found: Scan, option: Option, value: str) -> None:
    if option.dest in ("help", "help_all", "version"):
        raise InformationRequested(option.dest)
    if option.dest == "print_completion":
        if value not in SHELLS:
            raise usage_error(f"--print-completion {value}: no such shell; use one of {', '.join(SHELLS)}")
        raise InformationRequested("completion", value)
    found.values[option.dest] = value


def _take_value(option: Option, rest: list[str], position: int) -> str:
    if position < len(rest):
        value = rest[position]
        if not value.startswith("-") or value == "-" or " " in value or _is_number(value):
            return value
        raise usage_error(
            f"{option.name} needs a value, but {value!r} follows; "
            f"if that is the value, write {option.name}={value}"
        )
    raise usage_error(f"{option.name} needs a value: {option.name} {option.metavar}")


def _is_option(word: str) -> bool:
    """Whether a word before the script is meant as an option (argparse's rules)."""
    if not word.startswith("-") or len(word) == 1:
        return False
    if word.partition("=")[0] in _BY_FLAG:
        return True
    return not _is_number(word) and " " not in word.partition("=")[0]


def is_address(word: str) -> bool:
    """`[HOST:]PORT`, which no script is called."""
    host, _, port = word.rpartition(":")
    return port.isascii() and port.isdigit() and (not host or "/" not in host)


def _is_number(word: str) -> bool:
    body = word.removeprefix("-")
    return body.replace(".", "", 1).isdigit()


def find_option(name: str) -> Option:
    """The option a flag names, spelled in full or shortened."""
    exact = _BY_FLAG.get(name)
    if exact is not None:
        return exact
    matches: list[Option] = []
    if name.startswith("--"):
        for flag, option in _BY_FLAG.items():
            if flag.startswith(name) and option not in matches:
                matches.append(option)
    # What is unique under torchrun stays unique: its options take precedence.
    matches = [option for option in matches if option.is_torchruns] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(option.name for option in matches)
        raise usage_error(f"{name} could be {names}; write it out")
    raise _unknown(name)


def _unknown(word: str) -> UsageError:
    import difflib

    name = word.partition("=")[0]
    dashed = name.replace("_", "-")
    near = [_ELSEWHERE[dashed]] if dashed in _ELSEWHERE else []
    near = near or difflib.get_close_matches(dashed, [option.name for option in OPTIONS], 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else "options of the script go after its name"
    return usage_error(f"{word}: no such option; {hint}")
