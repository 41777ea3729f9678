"""Where logs go: stream flags, directories that are never reused, run ids that are never trusted."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.logs import temporary_logs
from phalanx.agent.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from tests.conftest import as_nobody, drop_privileges


def envs(n: int = 1, run_id: str = "run", restart: object = 0) -> dict[int, dict[str, str]]:
    env = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restart)}
    return {rank: dict(env) for rank in range(n)}


@pytest.fixture(autouse=True)
def private_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary directories of these tests go away with them."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


# ---- Std


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Std.NONE),
        ("3", Std.ALL),
        ("0:3,1:0,12:1", {0: Std.ALL, 1: Std.NONE, 12: Std.OUT}),
        ("7:2", {7: Std.ERR}),
        ("100:1", {100: Std.OUT}),
    ],
)
def test_std_from_str(text: str, expected: object) -> None:
    assert Std.from_str(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "4", "-1", "a", " 1", "1 ", "0:4", "0:", ":1", "0:1,", ",", "0:1,2", "1,2", "0:1:2", "²:1", "0:٣"],
)
def test_std_from_str_refuses_and_names_the_value(text: str) -> None:
    with pytest.raises(ValueError, match="not a valid set of streams") as caught:
        Std.from_str(text)
    assert repr(text) in str(caught.value)


@given(st.dictionaries(st.integers(0, 10**6), st.sampled_from(list(Std)), min_size=1))
def test_std_maps_survive_the_trip_through_text(wanted: dict[int, Std]) -> None:
    assert Std.from_str(",".join(f"{rank}:{int(std)}" for rank, std in wanted.items())) == wanted


def test_std_is_a_flag() -> None:
    assert Std.OUT | Std.ERR == Std.ALL == 3
    assert not Std.NONE


def test_to_map_fills_missing_ranks_and_drops_others() -> None:
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR, 9: Std.ALL}, 3) == {0: Std.NONE, 1: Std.ERR, 2: Std.NONE}


# ---- reify


def test_layout_of_files(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects={0: Std.ERR}, tee={1: Std.OUT})
    dest = specs.reify(envs(2, "job7", 3))
    (run_dir,) = (tmp_path / "logs").iterdir()
    assert run_dir.name.startswith("job7_")
    attempt = str(run_dir / "attempt_3")
    assert dest == LogsDest(
        stdouts={0: "", 1: f"{attempt}/1/stdout.log"},
        stderrs={0: f"{attempt}/0/stderr.log", 1: ""},
        tee_stdouts={1: f"{attempt}/1/stdout.log"},
        tee_stderrs={},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr=f"{attempt}/filtered_stderr.log",
    )
    assert all(os.path.isdir(os.path.dirname(path)) for path in dest.error_files.values())


def test_a_rank_filter_limits_the_console_not_the_files(tmp_path: Path) -> None:
    dest = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT, local_ranks_filter={1}).reify(envs(2))
    assert set(dest.tee_stdouts) == {1}
    assert dest.stdouts[0].endswith("0/stdout.log")
    assert dest.stderrs == {0: os.devnull, 1: ""}  # written straight to the console otherwise


def test_earlier_logs_are_never_reused_or_removed(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    seen: set[str] = set()
    for restart in (0, 0, 0, 1, 0, 1):
        path = specs.reify(envs(restart=restart)).stdouts[0]
        assert path not in seen
        assert not os.path.exists(path)
        Path(path).write_text(path)
        seen.add(path)
    assert all(Path(path).read_text() == path for path in seen)
    (run_dir,) = (p for p in tmp_path.iterdir() if p.name.startswith("run_"))
    names = sorted(p.name for p in run_dir.iterdir())
    assert names == ["attempt_0", "attempt_0.1", "attempt_0.2", "attempt_0.3", "attempt_1", "attempt_1.1"]


def test_two_runs_of_one_name_do_not_meet(tmp_path: Path) -> None:
    one, two = (DefaultLogsSpecs(str(tmp_path)).reify(envs()).error_files[0] for _ in range(2))
    assert one != two


@pytest.mark.parametrize(
    "run_id", ["../x", "/abs", "a/b", "a\0b", "..", ".", ".hidden", "line\nbreak", "x" * 300, "é" * 120]
)
def test_a_run_id_that_is_no_plain_name_is_refused(run_id: str, tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    with pytest.raises(ValueError, match="run id"):
        specs.reify(envs(run_id=run_id))
    assert list((tmp_path / "logs").iterdir()) == []


@given(run_id=st.text(min_size=1, max_size=300))
def test_whatever_the_run_id_nothing_is_made_elsewhere(
    run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("outer") / "logs"
    try:
        dest = DefaultLogsSpecs(str(root)).reify({0: {"TORCHELASTIC_RUN_ID": run_id}})
    except ValueError:
        pass
    else:
        assert os.path.realpath(dest.error_files[0]).count(os.sep) == str(root).count(os.sep) + 4
        assert os.path.realpath(dest.error_files[0]).startswith(str(root) + os.sep)
    assert [p.name for p in root.parent.iterdir()] == ["logs"]


def test_defaults_when_the_environment_says_nothing(tmp_path: Path) -> None:
    dest = DefaultLogsSpecs(str(tmp_path / "l")).reify({0: {}})
    assert "/none_" in dest.error_files[0]
    assert "/attempt_0/0/" in dest.error_files[0]


def test_a_bad_restart_count_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TORCHELASTIC_RESTART_COUNT='\.\./1'"):
        DefaultLogsSpecs(str(tmp_path)).reify(envs(restart="../1"))


def test_no_workers_no_paths(tmp_path: Path) -> None:
    assert DefaultLogsSpecs(str(tmp_path)).reify({}).error_files == {}


# ---- log_dir


@pytest.mark.parametrize("log_dir", [None, ""])
def test_without_log_dir_a_private_directory_is_made_when_needed(log_dir: str | None, tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir)
    assert specs.is_temporary
    assert list((tmp_path / "tmp").iterdir()) == []
    dest = specs.reify(envs())
    root = Path(specs.root_log_dir)
    assert root.parent == tmp_path / "tmp"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert dest.error_files[0].startswith(f"{root}/")


def test_after_a_success_a_temporary_directory_without_output_is_removed(tmp_path: Path) -> None:
    for tee, succeeded, left in ((Std.NONE, True, 0), (Std.NONE, False, 1), (Std.ALL, True, 1)):
        specs = DefaultLogsSpecs(None, tee=tee)
        Path(specs.reify(envs()).error_files[0]).write_text("{}")  # of an attempt that was restarted
        specs.clean_up(succeeded)
        found = list((tmp_path / "tmp").iterdir())
        assert len(found) == left
        for directory in found:
            temporary_logs.remove(str(directory))
    assert not list((tmp_path / "tmp").iterdir())


def test_old_temporary_directories_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    week = 8 * 86400
    made: dict[str, tuple[int, int, bool]] = {  # pid, age, removed
        "old": (gone.pid, week, True),
        "new": (gone.pid, 60, False),
        "alive": (os.getpid(), week, False),
    }
    for name, (pid, age, _) in made.items():
        inside = tmp_path / f"phalanx_{pid}_{name}" / "run" / "attempt_0"
        inside.mkdir(parents=True)
        (inside / "error.json").write_text("{}")
        (inside / "link").symlink_to("/etc")
        when = time.time() - age
        for path in (inside / "error.json", inside, inside.parent, inside.parent.parent):
            os.utime(path, (when, when))
        os.utime(inside / "link", (when, when), follow_symlinks=False)
    others = [tmp_path / "phalanx_notes", tmp_path / "phalanx_x_y", tmp_path / "mine"]
    for path in others:
        path.mkdir()
        os.utime(path, (0, 0))
    (tmp_path / f"phalanx_{gone.pid}_link").symlink_to("/etc")
    temporary_logs.remove_old(str(tmp_path))
    for name, (pid, _, removed) in made.items():
        assert (tmp_path / f"phalanx_{pid}_{name}").exists() is not removed, name
    assert all(path.exists() for path in others)
    assert (tmp_path / f"phalanx_{gone.pid}_link").is_symlink()
    temporary_logs.remove_old(str(tmp_path / "nowhere"))


def test_temporary_logs_stay_as_long_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    old = tmp_path / f"phalanx_{gone.pid}_old"
    for kept, stays in ((None, True), (7200.0, True), (1800.0, False)):
        old.mkdir(exist_ok=True)
        os.utime(old, (time.time() - 3600,) * 2)
        specs = DefaultLogsSpecs(keep_logs=kept)
        assert specs.root_log_dir.startswith(str(tmp_path))
        specs.clean_up(succeeded=True)
        assert old.exists() is stays


def test_the_global_ranks_filter_limits_the_console(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT, ranks_filter={5, 7})
    mine = {rank: {**env, "RANK": str(4 + rank)} for rank, env in envs(4).items()}
    dest = specs.reify(mine)
    assert sorted(dest.tee_stdouts) == [1, 3]
    assert sorted(dest.stdouts) == [0, 1, 2, 3]
    assert [dest.stderrs[rank] for rank in range(4)] == [os.devnull, "", os.devnull, ""]


def test_log_dir_is_made_with_its_parents(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert specs.root_log_dir == str(tmp_path / "a" / "b")


def test_log_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="is a file"):
            DefaultLogsSpecs(str(path))


def test_log_dir_that_cannot_be_written_is_refused() -> None:
    with as_nobody() as folder:
        (folder / "locked").mkdir(mode=0o500)
        drop_privileges()
        for path in (folder / "locked", folder / "locked" / "below"):
            with pytest.raises(PermissionError, match="is not writable"):
                DefaultLogsSpecs(str(path))


def test_a_log_dir_that_cannot_be_made_is_named() -> None:
    with pytest.raises(OSError, match="log_dir"):
        DefaultLogsSpecs("/proc/phalanx-logs")


def test_a_log_dir_deleted_under_way_is_made_again(tmp_path: Path) -> None:
    import shutil

    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    specs.reify(envs())
    shutil.rmtree(tmp_path / "logs")
    assert os.path.isdir(os.path.dirname(specs.reify(envs()).error_files[0]))


# ---- values


def test_equality_and_repr_are_by_what_was_asked(tmp_path: Path) -> None:
    assert DefaultLogsSpecs() == DefaultLogsSpecs()
    assert DefaultLogsSpecs(str(tmp_path), tee=Std.ALL) == DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    assert DefaultLogsSpecs(tee=Std.ALL) != DefaultLogsSpecs(tee=Std.OUT)
    assert DefaultLogsSpecs() != "specs"
    assert str(tmp_path) in repr(DefaultLogsSpecs(str(tmp_path)))


def test_logs_specs_is_abstract() -> None:
    with pytest.raises(TypeError):
        LogsSpecs()  # type: ignore[abstract]
