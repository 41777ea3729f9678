"""What a script imports before it does anything that can be seen, read from its text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.agent.warm.leading_imports import LeadingImports, leading_imports

INSTALLED = "/usr/lib/site-packages/"


def read(folder: Path, text: str = "", mode: str = "script", target: str = "") -> LeadingImports:
    script = folder / "train.py"
    script.write_text(text)
    search = [str(folder), INSTALLED]
    return leading_imports([mode, target or str(script)], search, (INSTALLED,), lambda _name: "")


def lines(folder: Path, text: str) -> list[str]:
    return [entry.line for entry in read(folder, text).entries]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch", ["torch"]),
        ("import torch.nn as nn, numpy", ["torch.nn", "numpy"]),
        ("from torch import nn, optim", ["torch:nn,optim"]),
        ("from torch import *", ["torch"]),
        ("from __future__ import annotations\nimport torch", ["__future__:annotations", "torch"]),
        ("try:\n    import apex\nexcept ImportError:\n    import spare\nimport torch", ["apex", "torch"]),
        ("if fast:\n    import apex\nimport torch", ["torch"]),
        ("def main():\n    import late\nimport torch", ["torch"]),
        ("log = logging.getLogger(__name__)\nimport torch", ["#", "torch"]),
        ("import torch\nwarnings.filterwarnings('ignore')\nimport numpy", ["torch", "#", "numpy"]),
        ("sys.stderr = None\nimport torch", ["#", "torch"]),
        ("names = ['a']\ndef f(a=1): print(a)\nimport torch", ["torch"]),
        ("def f(a=print('first')): pass\nimport torch", []),
        ("class A:\n    print('first')\nimport torch", []),
        ("@main()\ndef f(): pass\nimport torch", []),
        ("print('first')\nimport torch", []),
        ("import torch\nmain()\nimport numpy", ["torch"]),
        ("import torch\nfor x in y:\n    pass\nimport numpy", ["torch"]),
        ("from . import outside", []),
        ("import torch\nsyntax error", []),
        ("os.environ['A'] = '1'\nimport torch", ["+A=1", "torch"]),
        ("import torch\nos.environ.setdefault('A', '1')", ["torch", "?A=1"]),
        ("import numpy\nos.environ['LD_PRELOAD'] = 'evil.so'\nimport torch", ["numpy"]),
        ("os.environ['A'] = 'two\\nlines'\nimport torch", []),
    ],
)
def test_the_block_at_the_top_of_a_script(text: str, found: list[str], tmp_path: Path) -> None:
    assert lines(tmp_path, text) == found


@pytest.mark.parametrize(
    ("text", "may_be_set"),
    [
        ("import torch\nos.environ['A'] = value()", frozenset()),
        ("os.environ['A'] = b + c\nimport torch", frozenset({"A"})),
        ("if fast:\n    os.environ['A'] = '1'\nimport torch", frozenset({"A"})),
        ("try:\n    os.environ['A'] = '1'\nexcept OSError:\n    pass\nimport torch", frozenset({"A"})),
        ("os.environ[b] = c\nimport torch", None),
        ("from os import environ as env\nimport torch", None),
        ("def f(a=os.environ.setdefault('A', b)): pass\nimport torch", frozenset({"A"})),
        ("def f():\n    os.environ['A'] = '1'\nimport torch", frozenset()),
    ],
)
def test_variables_that_may_be_set_before_an_import(
    text: str, may_be_set: frozenset[str] | None, tmp_path: Path
) -> None:
    (found,) = [entry for entry in read(tmp_path, text).entries if entry.name == "torch"]
    assert found.may_be_set == may_be_set


def package(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_the_users_own_modules_are_followed_and_never_named(tmp_path: Path) -> None:
    package(
        tmp_path,
        models__init="",
        models__large="from .small import Small\nimport numpy\nregister()\nimport scipy\n",
        models__small="from . import parts\nimport torch\n",
        models__parts="import networkx\n",
    )
    (tmp_path / "models" / "init.py").rename(tmp_path / "models" / "__init__.py")
    found = read(tmp_path, "import os\nfrom models.large import Large\nimport einops\n")
    order = ["os", "networkx", "torch", "numpy", "#", "scipy", "einops"]
    assert [entry.line for entry in found.entries] == order
    assert [Path(path).stem for path in found.own] == ["train", "__init__", "large", "small", "parts"]


def test_all_that_an_own_module_may_set_counts_from_its_import_on(tmp_path: Path) -> None:
    """Its functions may be called while it is imported."""
    package(tmp_path, setup="import numpy\ndef f():\n    os.environ['A'] = '1'\nf()\n")
    found = {entry.line: entry.may_be_set for entry in read(tmp_path, "import torch, setup, scipy\n").entries}
    assert (found["torch"], found["numpy"], found["scipy"]) == (frozenset(), {"A"}, {"A"})


def test_a_circle_of_own_modules_ends(tmp_path: Path) -> None:
    package(tmp_path, one="import two\nimport torch\n", two="import one\nimport numpy\n")
    assert lines(tmp_path, "import one\n") == ["numpy", "torch"]


def test_directories_without_an_init_are_packages_too(tmp_path: Path) -> None:
    package(tmp_path, space__inside="import torch\n")
    assert lines(tmp_path, "from space.inside import x\nimport numpy\n") == ["torch", "numpy"]


@pytest.mark.parametrize(
    ("text", "edits"),
    [
        ("sys.path.append('src')", False),
        ("sys.path.insert(0, 'src')", True),
        ("sys.path = ['src']", True),
        ("sys.path[:0] = ['src']", True),
        ("sys.path += ['src']", True),
        ("sys.meta_path.insert(0, Finder)", True),
        ("sys.modules['numpy'] = fake", True),
        ("def f():\n    sys.path.insert(0, 'src')", False),
    ],
)
def test_an_edit_of_the_search_path_is_noticed(text: str, edits: bool, tmp_path: Path) -> None:
    assert read(tmp_path, f"{text}\nimport torch\n").edits_path == edits


def test_a_module_and_code_are_programs_as_well(tmp_path: Path) -> None:
    package(tmp_path, app__train="import torch\nprint('first')\nimport numpy\n", app__main="import scipy\n")
    (tmp_path / "app" / "__init__.py").write_text("import networkx\n")
    module = read(tmp_path, mode="module", target="app.train")
    assert [entry.line for entry in module.entries] == ["networkx", "torch"]
    code = read(tmp_path, mode="code", target="import torch; print(1); import numpy")
    assert [entry.line for entry in code.entries] == ["torch"]


def test_a_script_in_a_pipe_is_left_to_the_worker(tmp_path: Path) -> None:
    """What is read here could not be read again."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = leading_imports(["script", str(pipe)], [str(tmp_path)], (INSTALLED,), lambda _name: "")
    assert (found.own, found.entries) == ([], [])
