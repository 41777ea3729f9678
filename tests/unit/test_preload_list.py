"""Which modules helpers may import in advance."""

from __future__ import annotations

import pytest

from phalanx.helpers.preload import preload_list
from phalanx.helpers.preload.packages import LEFT_OUT, PACKAGES
from phalanx.helpers.preload.preload_list import (
    is_listed,
    is_read,
    left_out,
    names_in,
    package_of,
)
from phalanx.helpers.preload.renewal import Renewal


@pytest.mark.parametrize("name", ["torch", "torch.nn.functional", "numpy", "json", "xml.dom.minidom"])
def test_listed_packages_and_the_standard_library_are_imported_in_advance(name: str) -> None:
    assert is_listed(name)
    assert left_out(name, frozenset()) == ""


@pytest.mark.parametrize("name", ["unproven", "unproven.torch", "phalanx.worker", "antigravity", "__main__"])
def test_nothing_else_is(name: str) -> None:
    assert not is_listed(name)
    assert left_out(name, frozenset())


def test_packages_of_a_namespace_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"space.good": ("1.0", "", ()), "large": ("1.0", "", ())}
    left = {"space.bad": "leaves a thread running", "large.bad": "starts a process"}
    monkeypatch.setattr(preload_list, "PACKAGES", rows)
    monkeypatch.setattr(preload_list, "LEFT_OUT", left)
    monkeypatch.setattr(preload_list, "_DOTTED", frozenset({"space.good", "space.bad", "large.bad"}))
    monkeypatch.setattr(preload_list, "_TOPS", frozenset({"space", "large"}))
    monkeypatch.setattr(preload_list, "_NAMESPACES", frozenset({"space"}))
    found = {
        name: (package_of(name), left_out(name, frozenset()))
        for name in ("space", "space.good.part", "space.bad.part", "space.other", "large.part", "large.bad.x")
    }
    unknown = "not on the list of proven packages"
    assert found == {
        "space": ("space", ""),
        "space.good.part": ("space.good", ""),
        "space.bad.part": ("space.bad", "leaves a thread running"),
        "space.other": ("space.other", unknown),
        "large.part": ("large", ""),
        "large.bad.x": ("large.bad", "starts a process"),
    }


def test_a_package_that_reads_what_the_script_may_set_is_left_to_the_workers() -> None:
    assert "reads HF_HOME" in left_out("huggingface_hub", frozenset({"AAA", "HF_HOME"}))
    assert "reads HF_HOME" in left_out("transformers.trainer", frozenset({"HF_HOME"})), "it imports the other"
    assert left_out("huggingface_hub", frozenset({"AAA"})) == ""
    assert "names are computed" in left_out("torch", None)
    assert left_out("markupsafe", None) == "", "it reads none"


@pytest.mark.parametrize(
    ("variable", "words", "found"),
    [("A", "A", True), ("AB", "A", False), ("AB", "A*", True), ("B", "A* C", False), ("B", "*", True)],
)
def test_variables_are_named_or_begin_alike(variable: str, words: str, found: bool) -> None:
    assert is_read(variable, words.split()) == found


def test_the_modules_of_a_list() -> None:
    lines = ["!bad", "~A", "=/file.py", "+A=1", "?B=2", "*mine", "torch:nn,optim", "&numpy"]
    assert names_in(lines) == {"mine", "torch", "numpy"}


def test_the_table_is_well_formed() -> None:
    assert not PACKAGES.keys() & LEFT_OUT.keys()
    for name, (version, reads, values) in PACKAGES.items():
        assert version[:1].isdigit(), name
        assert reads.split() == sorted(reads.split()), name
        for line in values:
            assert len(line.split()) in (3, 5), line


class Kept:
    number = 3


TABLE = {"pid": 0}
TEXT = "run-c9bf9e57-1685-4c89-bafb-ff5af830be8a"
SAME = TEXT
STARTED = 1.5


def test_every_process_makes_its_values_again() -> None:
    """Two processes of a clean environment differ in these; tests/warm_packages finds them."""
    import os
    import random
    import sys

    module = sys.modules[__name__]
    own = random.Random(7)
    module.generator = own  # type: ignore[attr-defined]
    lines = ["pid {} TABLE.pid", "uuid {} TEXT", "uuid {} SAME", "wall {} STARTED", "seed {} generator"]
    lines += ["randint 10 12 {} Kept.number", "pid {} MISSING", "pid no.such.module x"]
    Renewal([line.format(__name__) for line in lines]).apply()
    assert {"pid": os.getpid()} == TABLE
    assert TEXT == SAME
    assert TEXT.startswith("run-")
    assert "c9bf9e57" not in TEXT
    assert STARTED > 1.5
    assert 10 <= Kept.number <= 12
    assert own.random() != random.Random(7).random()
