"""Options in a file beside the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.dry_run import plan
from phalanx.errors import UsageError
from phalanx.job.config import parse
from phalanx.job.options import JobSpec

PATH = {"PATH": os.environ.get("PATH", os.defpath)}
RUN = 'nproc-per-node = 2\ngrace = "1m30s"\nmax_restarts = 3\nverbose = true\npreload = ["json", "re"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def ask(folder: Path, *argv: str, **environ: str) -> JobSpec:
    return parse([*argv, str(folder / "train.py")], {**PATH, **environ})


def refusal(folder: Path, text: str) -> str:
    (folder / "phalanx.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        ask(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")


@pytest.mark.parametrize(("name", "table"), [("phalanx.toml", "run"), ("pyproject.toml", "tool.phalanx.run")])
def test_a_file_beside_the_script_sets_options(folder: Path, name: str, table: str) -> None:
    (folder / name).write_text(f"[{table}]\n{RUN}")
    job = ask(folder)
    assert (job.workers.local_world_size, job.restarts.shutdown_timeout, job.restarts.max_restarts) == (
        2,
        90,
        3,
    )
    assert (job.output.verbose, job.workers.preload, job.warnings) == (True, ("json", "re"), ())


def test_a_command_line_overrides_a_variable_and_a_variable_the_file(folder: Path) -> None:
    (folder / "phalanx.toml").write_text(f"[run]\n{RUN}")
    assert ask(folder, PHALANX_GRACE="4").restarts.shutdown_timeout == 4
    assert ask(folder, "--grace", "5", PHALANX_GRACE="4").restarts.shutdown_timeout == 5
    assert ask(folder, PHALANX_VERBOSE="0").output.verbose is False


def test_the_file_overrides_what_the_scheduler_says(folder: Path) -> None:
    (folder / "phalanx.toml").write_text("[run]\nnproc-per-node = 5\n")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_GPUS_ON_NODE": "3",
    }
    assert ask(folder, **slurm).workers.local_world_size == 5


def test_only_a_file_beside_the_script_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = folder / "below"
    below.mkdir()
    (below / "train.py").write_text("")
    (folder / "phalanx.toml").write_text("[run]\nnproc-per-node = 5\n")
    (below / "pyproject.toml").write_text("[project]\nname = 'uses-phalanx'\n")
    assert ask(below).workers.local_world_size == 1
    monkeypatch.chdir(folder)
    assert parse(["train.py"], PATH).workers.local_world_size == 5
    assert parse(["-m", "json.tool"], PATH).workers.local_world_size == 5


def test_a_dry_run_shows_where_each_value_comes_from(folder: Path) -> None:
    (folder / "phalanx.toml").write_text("[run]\nmax-restarts = 3\nnproc-per-node = 2\ngrace = '1m'\n")
    job = ask(
        folder, "--dry-run", "--nproc-per-node", "1", PHALANX_GRACE="9", PHALANX_NOTIFY="http://h/secret"
    )
    text = plan(job)
    for line in (
        "# from the command line: --nproc-per-node 1",
        "# from PHALANX_GRACE: --grace 9",
        "# from PHALANX_NOTIFY: --notify ...",
        "# from phalanx.toml: --max-restarts 3",
    ):
        assert f"{line}\n" in text
    assert "secret" not in text.partition("# local rank 0")[0]
    assert ask(folder).origins == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[run]\nmax-restart = 2\n",
            "phalanx.toml: max-restart: no such option; did you mean max-restarts?",
        ),
        ("[run]\nhelp = true\n", "phalanx.toml: help: no such option"),
        ("[run]\nverbose = 'yes'\n", "phalanx.toml: verbose = 'yes': write true or false"),
        ("[run]\ngrace = {a = 1}\n", "phalanx.toml: grace = {'a': 1}: write text or a number"),
        ("run = 3\n", "phalanx.toml: run is not a table; write [run]"),
        ("[run\n", "phalanx.toml: "),
        ("[run]\ngrace = 'soon'\n", "phalanx.toml: grace = soon: not a duration"),
        ("[run]\nnnodes = '4:2'\n", "phalanx.toml: nnodes = 4:2: the minimum is larger"),
    ],
)
def test_what_a_file_may_not_hold(folder: Path, text: str, words: str) -> None:
    assert refusal(folder, text).startswith(words)


def test_without_a_reader_of_toml_one_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    assert refusal(folder, "[run]\ngrace = 3\n").startswith(
        "phalanx.toml: this Python reads no TOML; pip install"
    )
    (folder / "phalanx.toml").unlink()
    (folder / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert ask(folder).restarts.shutdown_timeout == 30


@pytest.mark.untraced
def test_without_a_file_nothing_is_imported_for_one(folder: Path) -> None:
    code = (
        "import sys; import phalanx.job.config as c\n"
        f"c.parse([{str(folder / 'train.py')!r}], {{}})\n"
        "print('phalanx.job.settings_file' in sys.modules, 'tomllib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False False\n"
