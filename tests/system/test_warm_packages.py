"""Real packages: the shipped list is what is observed, and a script sees the same at every launch.

A sample of what is installed here belongs to every run. All packages, each in a clean environment, are the
work of `make prove-packages` (tests/warm_packages), which writes the list.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx.helpers.preload.packages import LEFT_OUT, PACKAGES
from phalanx.helpers.preload.preload_list import is_read, reads_of
from tests.warm_packages.__main__ import judge, launched
from tests.warm_packages.four_starts import four_starts
from tests.warm_packages.judgement import Judgement
from tests.warm_packages.observation import observe
from tests.warm_packages.packages import PACKAGES as EXAMINED
from tests.warm_packages.tables import HEAD, PAGE, shipped, written

# Observed in two processes. Two of them are left out, each for another reason.
SAMPLE = {
    "torch": "torch",
    "numpy": "numpy",
    "jax": "jax",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "transformers": "transformers",
    "huggingface_hub": "huggingface_hub",
    "sympy": "sympy",
    "requests": "requests",
    "psutil": "psutil",
}
# Launched four times.
STARTED = ("numpy", "torch", "transformers", "requests", "psutil", "networkx")


def needs(module: str) -> None:
    if find_spec(module) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{module} is not installed")


@functools.cache
def observed(package: str) -> Judgement:
    needs(SAMPLE[package])
    judgement = Judgement()
    judgement.add(*observe(sys.executable, EXAMINED[package]))
    judgement.settle()
    return judgement


@pytest.mark.untraced
@pytest.mark.parametrize("package", SAMPLE)
def test_the_list_is_what_is_observed(package: str) -> None:
    found = observed(package)
    for name, (_, variables, values) in found.rows.items():
        assert name not in LEFT_OUT, f"{name} is left out ({LEFT_OUT[name]}), but suits a fork here"
        if name not in PACKAGES and name != SAMPLE[package]:
            continue  # what only this environment has, beside the package
        shipped = reads_of(name)
        assert not [one for one in variables.split() if not is_read(one, shipped)], name
        assert set(values) <= set(PACKAGES[name][2]), name
    for name, why in found.left_out.items():
        assert name in LEFT_OUT or name not in PACKAGES, f"{name}: {why}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_row_is_well_formed(name: str) -> None:
    version, variables, values = PACKAGES[name]
    assert version
    assert sorted(set(variables.split())) == variables.split()
    kinds = ("seed", "uuid", "pid", "wall", "steady", "wall_ns", "steady_ns", "seconds", "randint")
    for value in values:
        words = value.split(" ")
        assert words[0] in kinds
        assert len(words) == (5 if words[0] == "randint" else 3)
        assert words[-2] == name or words[-2].startswith(f"{name}.")
    assert name not in LEFT_OUT


@pytest.mark.untraced
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STARTED)
def test_a_script_sees_the_same_at_every_launch(name: str) -> None:
    needs(name)
    assert four_starts(sys.executable, name, EXAMINED[name]).verdict() == "same"


# ---- what the proof finds ------------------------------------------------------------------------

UNSUITABLE = {
    "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()": "leaves 1 thread",
    "import socket; kept = socket.socket()": "opens socket",
    "import subprocess; kept = subprocess.Popen(['sleep', '60'])": "starts a process",
    "import mmap; kept = mmap.mmap(-1, 4096)": "maps shared memory",
    "import signal; signal.signal(signal.SIGUSR1, lambda *frame: None)": "sets a handler of SIGUSR1",
    "import sys; sys.path.append('/nowhere')": "edits sys.path",
    "import sys; debug = '-d' in sys.argv": "reads sys.argv",
    "import sys; sys.excepthook = lambda *error: None": "sets sys.excepthook",
    "import os; os.umask(0o22 ^ os.umask(0))": "changes the umask",
    "import os; rank = os.environ.get('RANK')": "reads RANK",
    "import os; rank = dict(os.environ).get('RANK')": "reads all variables, RANK among them",
    "import ctypes; ctypes.CDLL(None).getenv(b'LOCAL_RANK')": "reads LOCAL_RANK",
    "import os; key = os.urandom(8)": "makes a random value",
    "import tempfile; folder = tempfile.mkdtemp()": "makes a random value",
    "import random; random.seed(1)": "seeds the generator of `random`",
    "import random; draw = [random.Random()]": "keeps a random generator",
    "import os; os.environ['KEY'] = os.urandom(4).hex()": "sets KEY to a random value",
    "raise ValueError('no')": "cannot be imported",
}
SUITABLE = {
    "import os, time; pid = os.getpid(); at = time.time()": ("pid odd pid", "wall odd at"),
    "import uuid; name = f'session-{uuid.uuid4()}'": ("uuid odd name",),
    "import random; rng = random.Random()": ("seed odd rng",),
    "import random; rng = random.Random(1)": (),
    "import random\nclass Kept: rng = random.Random()\nkept = {'one': Kept()}": ("seed odd Kept.rng",),
    "import os, sys; sys.path.append('/nowhere'); sys.path.remove('/nowhere')": (),
    "import threading; one = threading.Thread(target=int); one.start(); one.join()": (),
}


def judged(folder: Path, text: str) -> Judgement:
    (folder / "odd.py").write_text(text)
    judgement = Judgement()
    judgement.add(*observe(sys.executable, ["odd"], path=folder))
    judgement.versions["odd"] = "1"
    judgement.settle()
    return judgement


@pytest.mark.untraced
@pytest.mark.parametrize("text", UNSUITABLE)
def test_an_import_with_an_effect_is_left_out(text: str, tmp_path: Path) -> None:
    found = judged(tmp_path, text)
    assert UNSUITABLE[text] in found.left_out["odd"]
    assert "odd" not in found.rows


@pytest.mark.untraced
@pytest.mark.parametrize("text", SUITABLE)
def test_values_that_a_worker_makes_again_are_named(text: str, tmp_path: Path) -> None:
    assert judged(tmp_path, text).rows["odd"][2] == SUITABLE[text]


IN_HELPERS = "open('/proc/self/comm').read() == 'worker-zygote\\n'"
LAUNCHED = {
    "here = True": "same",
    f"import mmap\nif {IN_HELPERS}: kept = mmap.mmap(-1, 4096)": "was not preloaded when it was launched",
    f"here = not {IN_HELPERS}": "a launch differs: launch 1: odd.here",
    f"if not {IN_HELPERS} and __import__('sys').argv[0][-9:] == 'script.py': raise ImportError": "",
    "import os; rank = os.environ.get('RANK')": "",
}


@pytest.mark.untraced
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", LAUNCHED)
def test_a_package_is_proven_by_launches_with_a_list_that_has_it(text: str, tmp_path: Path) -> None:
    """Those of a package that was not preloaded prove nothing."""
    folder = tmp_path / "site-packages"
    (folder / "odd-1.0.dist-info").mkdir(parents=True)
    (folder / "odd-1.0.dist-info" / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (folder / "odd-1.0.dist-info" / "RECORD").write_text("odd.py,,\n")
    (folder / "odd.py").write_text(text)
    found: dict[str, Any] = {"package": "odd", "modules": ["odd"], "starts": "", "failed": ""}
    found["observed"] = observe(sys.executable, ["odd"], path=folder)
    found["starts"] = launched(sys.executable, found, folder)
    assert found["starts"].startswith(LAUNCHED[text])
    assert bool(found["starts"]) == bool(LAUNCHED[text])
    judgement = judge({"odd": found})
    assert ("odd" in judgement.rows) == ("odd" not in judgement.left_out) == (LAUNCHED[text] == "same")
    if found["starts"] not in ("", "same"):
        assert judgement.left_out["odd"] == f"not proven: {found['starts']}"


@pytest.mark.untraced
def test_what_imports_an_unproven_package_is_left_out_as_well(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("")
    (tmp_path / "user.py").write_text("import odd")
    rows = {name: observe(sys.executable, [name], path=tmp_path) for name in ("odd", "user")}
    found = {
        name: {"modules": [name], "observed": seen, "starts": "same", "failed": ""}
        for name, seen in rows.items()
    }
    assert judge(found).left_out == {}
    found["odd"]["starts"], found["odd"]["failed"] = "", "first: exit code 1"
    assert judge(found).left_out == {"odd": "not proven: first: exit code 1", "user": "imports odd"}


@pytest.mark.untraced
def test_what_is_imported_counts_and_variables_of_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text("import os; os.environ.get('TORCH_A'), 'ODD_B' in os.environ")
    (tmp_path / "bad.py").write_text("import socket; kept = socket.socket()")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__init__.py").write_text("")
    (tmp_path / "part" / "worse.py").write_text("import bad")
    judgement = Judgement()
    (tmp_path / "odd.py").write_text("import reader, ctypes; ctypes.CDLL(None).getenv(b'ODD_C')")
    judgement.add(*observe(sys.executable, ["odd", "part.worse"], path=tmp_path))
    judgement.versions |= {"odd": "1", "reader": "1", "part": "1", "bad": "1"}
    judgement.settle()
    assert judgement.rows["odd"][1] == "ODD_B ODD_C TORCH*"
    assert judgement.rows["reader"][1] == "ODD_B TORCH*"
    assert "part" in judgement.rows
    assert judgement.left_out["part.worse"] == "imports bad"
    assert "opens socket" in judgement.left_out["bad"]


def test_the_list_is_written_where_it_ships() -> None:
    assert shipped()[0].keys() == PACKAGES.keys()
    assert PAGE.read_text().count(HEAD) == 1


def test_tables_are_written_as_they_are_read() -> None:
    rows = {
        "short": ("1.0", "", ()),
        "long": ("2.0", " ".join(f"VARIABLE_{n:03}" for n in range(40)), ("pid long one",)),
        "more": ("2.1", " ".join(f"VARIABLE_{n:03}" for n in range(42)), ()),
        "many": ("3", "A_*", tuple(f"seed many.{'part' * n} generator" for n in range(15))),
    }
    left_out = {"odd": 'a "quoted" \\ reason', "far": "a reason " * 30}
    text = written(rows, left_out)
    space: dict[str, Any] = {}
    exec(text, space)
    assert "@long VARIABLE_040 VARIABLE_041" in text
    for name, (version, variables, values) in rows.items():
        row = space["PACKAGES"][name]
        assert (row[0], sorted(reads_of(name, space["PACKAGES"])), row[2]) == (
            version,
            variables.split(),
            values,
        )
    assert space["LEFT_OUT"]["odd"] == left_out["odd"]
    assert left_out["far"].startswith(space["LEFT_OUT"]["far"].removesuffix(" …"))
    assert max(map(len, text.splitlines())) <= 110
