"""The pages agree with the code: options and variables exist, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from phalanx.cli.k8s import OPTIONS_HERE as K8S
from phalanx.job.options import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OWN = {flag for option in OPTIONS for flag in option.flags}
OF_OTHER_COMMANDS = {
    # phalanx store, drain, doctor, warm
    "--stop",
    "--listen", "--journal", "--linger", "--self", "--timeout", "--with", "--wait", "--json",
    # phalanx quarantine
    "--for", "--reason", "--dir",
    # phalanx check
    "--only", "--disk",
    # phalanx status, list, logs, stacks
    "--watch", "--all", "--rank", "--node", "--attempt", "--since", "--grep", "--full", "--all-users",
    # make chaos
    "--duration", "--episodes", "--seed", "--agents", "--backend", "--faults", "--list-faults", "--idle",
    "--keep", "--keep-going",
    # phalanx warm
    "--explain", "--forget",
    # phalanx slurm
    "--spares", "--requeues", "--notice", "--print", "--sbatch",
    *K8S,
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


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_options_exist(page: Path) -> None:
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert mentioned - OWN - OF_OTHER_COMMANDS - OF_OTHER_PROGRAMS == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_variables_are_read_or_set_somewhere(page: Path) -> None:
    known = {option.env for option in OPTIONS if option.env}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in set(VARIABLE.findall(page.read_text())):
        # A row such as `PHALANX_<OPTION>` is a pattern, not a name.
        assert name in known or name.endswith("_") or f'"{name}"' in source, name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, section = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not section or section in anchors(linked), target
