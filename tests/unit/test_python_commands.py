"""Every command line of a Python is listed: only the user's own may import from the current directory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# Every list in our modules with this Python, or with `python` or `-m`. Start a module of ours by
# `python_command`: without the current directory in `sys.path`, where anybody may have put a `select.py`.
ALLOWED = {
    "python_command.py": {"[sys.executable, '-c', _RUN, PACKAGE_ROOT, module, *words]"},
    # Isolated, or code that begins with the same, or one of our files by its path.
    "agent/gpu_probe.py": {"[sys.executable, '-I', '-S', os.path.join(place[0], 'gpus.py')]"},
    "agent/warm/explain.py": {"[sys.executable, '-c', code]"},
    "agent/warm/spawner.py": {"[sys.executable, *words]"},
    "agent/workers/worker_kinds.py": {
        "[sys.executable, *interpreter_flags(), BOOTSTRAP, 'function', options, name]",
        "['python', *flags]",  # a kind of helper, which the spawner starts
        "['python', *interpreter_flags()]",
    },
    "agent/warm/helper_pool.py": {"['python', *flags]"},
    # The program of the user, as plain Python starts it.
    "swap.py": {"[sys.executable, *words]"},
    "job/rules.py": {"('-m', *words)"},
    # Nothing is started: keys, comparisons, the words that a process is seen with, a debugger's pattern.
    "agent/warm/import_cache.py": {"[_FORMAT, sys.executable, sys.version.split()[0]]"},
    "agent/warm/launch_key.py": {
        "[sys.version, f'{sys.executable} {_identity(sys.executable)}', here, *own]"
    },
    "job/program.py": {"('-m', '-c')"},
    "helpers/fork_setup.py": {"[sys.executable, *words, *args]", "['-m', target]"},
    "worker/bootstrap.py": {"['-m', target]"},
    "agent/workers/debugger.py": {"[sys.executable, '-c', 'pass']"},
}


def commands(source: str) -> set[str]:
    """The lists and tuples of a module with this Python, any `python`, or `-m` among their elements."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple):
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and ast.unparse(part) == "sys.executable":
                    found.add(ast.unparse(node))
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if {"-m", "python", "python3"} & {word for word in words if isinstance(word, str)}:
                found.add(ast.unparse(node))
    return found


def test_only_listed_commands_start_python() -> None:
    found = {str(path.relative_to(ROOT)): commands(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == ALLOWED, "use phalanx.python_command"


@pytest.mark.parametrize(
    "source",
    [
        "run([sys.executable, '-m', 'phalanx'])",
        "run([*ssh, sys.executable, *words])",
        "run(('/usr/bin/env', 'python3', '-c', code))",
        "words = ['-m', 'phalanx.agent']",
        "run([f'{sys.executable} -m phalanx'], shell=True)",
    ],
)
def test_what_is_found(source: str) -> None:
    assert commands(source)


def test_no_name_hides_this_python() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "sys"), path
