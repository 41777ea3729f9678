"""Which variables the user's files may set, as far as their text tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.helpers.preload.variables import (
    constant_set_by,
    constants_in,
    names_set_by,
    parse,
    variables_set_in,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ['A'] = '1'", set()),  # repeated by the preload
        ("os.environ.setdefault('A', '1')", set()),
        ("os.environ['A'] = '2'", {"A"}),  # after the block that the preload repeats
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
        ("for name in ['AA', 'BB']: os.environ[name] = '1'", None),
        ("env = os.environ\nenv['AA'] = '1'", None),
        ("from os import environ as env\nenv['AA'] = '1'", None),
        ("set_variable = os.environ.__setitem__\nset_variable('AA', '1')", None),
        ("os.environ.update(values)", None),
        ("f(os.environ)", None),
        ("f(env=os.environ)", set()),
        ("f(into=os.environ)", None),
        ("f(settings={'env': os.environ})", None),
        ("f(dict(os.environ), len(os.environ), *os.environ, **os.environ)", set()),
        ("with patch.dict(os.environ, {'A': '1'}): pass", None),
        ("with patch.dict('os.environ', {'A': '1'}): pass", None),
        ("e: dict = os.environ\ne['A'] = '1'", None),
        ("(e := os.environ)['A'] = '1'", None),
        ("e, f = os.environ, 1\ne['A'] = '1'", None),
        ("e = os.environ or {}\ne['A'] = '1'", None),
        ("def g(e=os.environ): e['A'] = '1'", None),
        ("def g(*, e=os.environ): e['A'] = '1'", None),
        ("def g(): return os.environ", None),
        ("def g(): yield os.environ", None),
        ("g = lambda: os.environ", None),
        ("list(map(os.environ.pop, names))", None),
        ("getattr(os, 'environ')['A'] = '1'", None),
        ("vars(os)['environ']['A'] = '1'", None),
        ("e = {**os.environ, 'A': '1'} if os.environ else os.environ | {'A': '1'}", set()),
        ("for name in os.environ: print(name, 'A' in os.environ, f'{os.environ}')", set()),
        ("e = [name for name in os.environ if os.environ[name]]", set()),
        ("load_dotenv()", None),
        ("def broken(:\n    os.environ['A'] = x", set()),  # it does not run either
    ],
)
def test_variables_that_a_script_may_set(text: str, names: set[str] | None, tmp_path: Path) -> None:
    """None: any, because the names are computed."""
    script = tmp_path / "script.py"
    script.write_text(f"{text}\n")
    assert variables_set_in([str(script)], {"+A=1", "?A=1"}) == names


def test_a_constant_counts_in_a_module_that_the_script_imports(tmp_path: Path) -> None:
    module = tmp_path / "settings.py"
    module.write_text("import os\nos.environ['A'] = '1'\n")
    assert variables_set_in([str(module)]) == {"A"}


def test_of_several_constants_the_last_is_repeated() -> None:
    assert constants_in(["+A=1", "torch", "+A=2", "?B=1"]) == {"+A=2", "?B=1"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f():\n    os.environ['A'] = value()", set()),
        ("class C:\n    os.environ['A'] = value()", {"A"}),
        ("if fast:\n    os.environ['A'] = '1'\nelse:\n    del os.environ['B']", {"A", "B"}),
        ("f = lambda: os.environ.pop('A')", set()),
        ("def f(a=os.environ.setdefault('A', b)): pass", {"A"}),
        ("@register(os.environ.pop('A'))\ndef f(): pass", {"A"}),
        ("@(lambda f: os.environ.update(A=b) or f)\ndef f(): pass", {"A"}),
    ],
)
def test_variables_that_one_statement_sets(text: str, names: set[str]) -> None:
    assert names_set_by(parse(text).body[0]) == names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("os.environ['A'] = '1'", ("+", "A", "1")),
        ("environ['A'] = '1'", ("+", "A", "1")),
        ("os.environ.setdefault('A', '1')", ("?", "A", "1")),
        ("os.environ['A'] = b", None),
        ("os.environ['A'] = '1' + b", None),
        ("a['A'] = '1'", None),
        ("a, os.environ['A'] = '1', '2'", None),
        ("os.environ['A'] = os.environ['B'] = '1'", None),
        ("os.environ.get('A', '1')", None),
    ],
)
def test_a_constant_is_known(text: str, found: tuple[str, str, str] | None) -> None:
    assert constant_set_by(parse(text).body[0]) == found
