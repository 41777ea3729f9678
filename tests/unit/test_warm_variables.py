"""Which variables the user's files may set, as far as their text tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.warm.variables import named_in_libraries, variables_set_in


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ['A'] = '1'", set()),  # repeated by the preload
        ("os.environ.setdefault('A', '1')", set()),
        ("os.environ['A'] = value()", {"A"}),
        ("if fast:\n    os.environ['A'] = '1'", {"A"}),
        ("def f():\n    environ['A'] = '1'", {"A"}),
        ("os.environ.update(A='1', B='2')", {"A", "B"}),
        ("os.environ.update({'A': '1'})", {"A"}),
        ("os.environ |= {'A': '1'}", {"A"}),
        ("del os.environ['A']", {"A"}),
        ("os.environ.pop('A', None)", {"A"}),
        ("os.putenv('A', '1')", {"A"}),
        ("value = os.environ.get('A')", set()),
        ("subprocess.run('A', env={**os.environ, 'B': '1'})", set()),
        ("for name in ['AA', 'BB']: os.environ[name] = '1'", {"AA", "BB"}),
        ("env = os.environ\nenv['AA'] = '1'", {"AA"}),
        ("load_dotenv()", {"FROM_FILE", "OTHER"}),
    ],
)
def test_variables_that_a_script_may_set(text: str, names: set[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{text}\n")
    (tmp_path / ".env").write_text("FROM_FILE=1\nexport OTHER=2\n# a comment\n")
    assert variables_set_in([str(script)], str(script)) == names


def test_a_constant_counts_in_a_module_that_the_script_imports(tmp_path: Path) -> None:
    module = tmp_path / "settings.py"
    module.write_text("import os\nos.environ['A'] = '1'\n")
    assert variables_set_in([str(module)], str(tmp_path / "script.py")) == {"A"}


def test_a_library_that_names_a_variable_may_read_it(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(bytes((1 << 24) - 3) + b"ODD_THREADS\0ODD_THREADS_EXTRA\0" + bytes(100))
    assert named_in_libraries(["OTHER", "ODD_THREADS"], [str(library)]) == "ODD_THREADS"
    assert named_in_libraries(["ODD_THREAD", "THREADS"], [str(library)]) == ""
    assert named_in_libraries(["ODD_THREADS"], [str(tmp_path / "missing.so")]) == ""
