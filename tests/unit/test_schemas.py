"""The published schemas of what commands print with --json; other tests hold the commands' output to them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.cli import main
from phalanx.errors import UsageError
from phalanx.observe.schemas import TYPES, schema
from tests.support.conforming import conforming

PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.mark.parametrize("name", TYPES)
def test_the_published_schema_is_that_of_the_types(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (PUBLISHED / f"{name}.json").read_text() == schema(name), "the types have changed: make options"
    assert main(["help", "schema", name]) == 0
    assert capsys.readouterr().out == schema(name)


def test_there_is_a_schema_for_each_file_and_a_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.stem for path in PUBLISHED.iterdir()} == set(TYPES)
    assert main(["help", "schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TYPES)
    assert main(["help", "schema", "nothing"]) == 2
    assert "choose one of status, runs" in capsys.readouterr().err


def test_a_field_that_the_schema_lacks_is_noticed() -> None:
    row = '{"host": "a", "reason": "b", "left": null'
    assert conforming("quarantine", f"[{row}}}]") == [{"host": "a", "reason": "b", "left": None}]
    with pytest.raises(AssertionError, match=r"quarantine\[0\]\.more"):
        conforming("quarantine", f'[{row}, "more": 1}}]')
    with pytest.raises(msgspec.ValidationError):
        conforming("quarantine", '[{"host": 7}]')


def test_the_error_is_bad_usage() -> None:
    from phalanx.cli.help import main as help_main

    with pytest.raises(UsageError, match="schema a b: choose one of"):
        help_main(["schema", "a", "b"])
