"""The pages agree with the code: commands, options and variables exist, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from phalanx.cli import COMMANDS
from phalanx.cli.help import reference
from phalanx.job.options import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OWN = {flag for option in OPTIONS for flag in option.flags}


@cache
def flags_of(command: str) -> set[str]:
    """The options that a command takes."""
    if command == "run":
        return OWN
    module = import_module(COMMANDS[command][0])
    if not hasattr(module, "make_parser"):
        return set()
    own = {flag for action in module.make_parser()._actions for flag in action.option_strings}
    return own | OWN if command in ("k8s", "slurm") else own


OF_OTHER_COMMANDS = {flag for command in COMMANDS for flag in flags_of(command)} | {
    # make chaos
    "--duration", "--episodes", "--seed", "--agents", "--backend", "--faults", "--list-faults", "--idle",
    "--keep", "--keep-going",
    # benchmarks and tests
    "--quick", "--runs", "--settle", "--python",
}  # fmt: skip
OF_OTHER_PROGRAMS = {
    # accelerate launch, sbatch, etcd, mypy, docker
    "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port",
    "--no-kill", "--kill-on-bad-exit", "--wait", "--gpus-per-node", "--nice",
    "--mixed_precision", "--cpu", "--signal", "--data-dir", "--strict", "--shm-size", "--read-only",
    "--no-cache-dir", "--from-literal",
    # examples/ray_launch.py
    "--nodes", "--min-nodes",
    # a training script, and how options may be shortened
    "--lr", "--device", "--redirect",
}  # fmt: skip
OLD_NAMES = {  # of the table in the changelog
    "--keep-warm", "--keep-logs", "--health-check", "PHALANX_KEEP_WARM", "PHALANX_KEEP_LOGS",
    "PHALANX_HEALTH_CHECK", "--with", "--self",
}  # fmt: skip
PLACES = [*PAGES, ROOT / "Dockerfile", ROOT / "examples", ROOT / "src"]
COMMAND = re.compile(r"(?<![\w./-])phalanx ([a-z][\w-]*)((?:\\\n|[^\n`|#;\"'])*)")
END_OF_COMMAND = re.compile(r"[,:.?!…)] |&&| -- | - ")
END_OF_OPTIONS = re.compile(r"SCRIPT|script|\S+\.py|-m|--no-python")  # what follows is the script's
REMOVED = {"dashboard", "doctor", "env", "events", "list"}
SHOWN = re.compile(r"(`|^ {4})$")  # a command, not a sentence about Phalanx
VARIABLE = re.compile(r"`((?:PHALANX|TORCHELASTIC|TORCH_ELASTIC|TORCH_DISABLE)_[A-Z_]+)\b")


def ids(path: Path) -> str:
    return path.name


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def texts_of(node: ast.AST) -> str:
    """The texts of a piece of source in their order, as one, with … for what is filled in."""
    if isinstance(node, ast.FormattedValue):
        return "…"
    if isinstance(node, ast.Constant):
        value = node.value.decode(errors="replace") if isinstance(node.value, bytes) else node.value
        return value if isinstance(value, str) else ""
    return "".join(texts_of(child) for child in ast.iter_child_nodes(node))


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Messages of other programs")[0]
    texts = [texts_of(ast.parse(path.read_text())) for path in (ROOT / "src").rglob("*.py")]
    quoted = re.findall(r"\*\*`(.+?)`\*\*", page)
    assert len(quoted) > 25
    missing = []
    for message in quoted:
        pieces = [piece.strip(" ;:,()") for piece in message.split("…")]
        wanted = [piece for piece in pieces if len(piece) > 7]
        missing += [f"{message}: {p!r}" for p in wanted if not any(p in text for text in texts)]
    assert missing == []


def test_the_reference_page_is_what_the_table_gives() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == reference(), "the table has changed: make options"
    for option in OPTIONS:
        assert f"{option.name} " in page or f"{option.name}`" in page
        assert option.env is None or f"`{option.env}`" in page


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_options_exist(page: Path) -> None:
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    known = OWN | OF_OTHER_COMMANDS | OF_OTHER_PROGRAMS
    assert mentioned - known - (OLD_NAMES if page.name == "CHANGELOG.md" else set()) == set()


def texts_in(path: Path) -> list[str]:
    """The text of a page; the strings of a program."""
    text = path.read_text(errors="replace")
    if not COMMAND.search(text):
        return []
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        texts = [texts_of(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
        return [re.sub(r"^ +", "", text, flags=re.MULTILINE) for text in texts]
    if path.name == "CHANGELOG.md":  # its tables have old names on the left
        text = re.sub(r"^ *\| `[^|]*\|", "", text, flags=re.MULTILINE)
    return [text]


def commands_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands that a text shows, with their options."""
    for found in COMMAND.finditer(text):
        words = re.split(r"[\s\[\]/=]+", END_OF_COMMAND.split(found[2])[0].replace("\\\n", " "))
        options = []
        for word in words:
            if END_OF_OPTIONS.fullmatch(word):
                break
            if re.fullmatch(r"--?[A-Za-z][\w-]*[,.:)]?", word):
                options.append(word.rstrip(",.:)").replace("_", "-"))
        before = text[: found.start()].rpartition("\n")[2]
        if found[1] in COMMANDS or found[1] in REMOVED or SHOWN.search(before):
            yield found[1], options


def test_commands_are_found_in_texts() -> None:
    assert list(commands_in("`phalanx logs RUN -f [--json]` and --not-of-it; run phalanx stop, or --no")) == [
        ("logs", ["-f", "--json"]),
        ("stop", []),
    ]
    prose = (
        "install phalanx there, from phalanx import worker; see phalanx list, `phalanx lits`\n    phalanx rnu"
    )
    assert [command for command, _ in commands_in(prose)] == ["list", "lits", "rnu"]
    assert list(commands_in("    phalanx run --nnodes 2 \\\n  -t 3 train.py --lr 1  # as --before")) == [
        ("run", ["--nnodes", "-t"])
    ]


@pytest.mark.parametrize("place", PLACES, ids=ids)
def test_commands_exist_and_have_these_options(place: Path) -> None:
    wrong = []
    for path in [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")]:
        for command, options in (one for text in texts_in(path) for one in commands_in(text)):
            if command in COMMANDS:
                known = flags_of(command) | {"-h", "--help"}
                wrong += [f"{path}: {command} {option}" for option in options if option not in known]
            else:
                wrong.append(f"{path}: {command}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_variables_are_read_or_set_somewhere(page: Path) -> None:
    known = {option.env for option in OPTIONS if option.env}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    mentioned = set(VARIABLE.findall(page.read_text()))
    if page.name == "CHANGELOG.md":
        mentioned -= OLD_NAMES
    # A row such as `PHALANX_<OPTION>` is a pattern, not a name.
    unknown = {name for name in mentioned - known if not name.endswith("_") and f'"{name}"' not in source}
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, section = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not section or section in anchors(linked), target
