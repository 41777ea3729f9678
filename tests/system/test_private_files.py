"""Timers signal only processes that asked for it, and logs are private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.run_helpers import plain_environment, run, script
from tests.system.hostile_user import NOBODY, as_root

FORGER = """
import json, os, sys, time
from phalanx.elastic.timer import FileTimerClient, expires
pipe = os.environ["TORCHELASTIC_TIMER_FILE"]
mine = os.environ["RANK"] == "0"
ready = os.path.join(sys.argv[1], os.environ["RANK"])
open(ready, "w").write(str(os.getpid()))
if mine:
    while not os.path.exists(os.path.join(sys.argv[1], "1")):
        time.sleep(0.01)
    zygote = os.getppid()
    keeper = int(open(f"/proc/{zygote}/stat").read().rpartition(")")[2].split()[1])
    other = int(open(os.path.join(sys.argv[1], "1")).read())
    fd = os.open(pipe, os.O_WRONLY)
    for pid in (zygote, keeper, other):
        line = {"version": 1, "pid": pid, "scope_id": "forged", "expiration_time": 1.0, "signal": 9}
        os.write(fd, json.dumps(line).encode() + b"\\n")
        started = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19]
        os.write(fd, json.dumps({**line, "started": int(started)}).encode() + b"\\n")
    os.close(fd)
    # Served after the forged ones: the watchdog still works.
    if os.fork() == 0:
        with expires(0.01, "own", FileTimerClient(pipe)):
            time.sleep(1000)
    assert os.WTERMSIG(os.wait()[1]) == 9
    open(os.path.join(sys.argv[1], "end"), "w").close()
while not os.path.exists(os.path.join(sys.argv[1], "end")):
    time.sleep(0.01)
print("survived", os.environ["RANK"], os.getpid(), flush=True)
"""


def test_a_line_in_the_timer_pipe_kills_only_its_writer(tmp_path: Path) -> None:
    env = plain_environment(TORCHELASTIC_ENABLE_FILE_TIMER="1", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    done = run("--nproc-per-node", "2", script(tmp_path, FORGER), str(ranks), env=env)
    assert done.code == 0, done
    for rank in ("0", "1"):
        assert f"survived {rank} {(ranks / rank).read_text()}" in done.out


@as_root
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_the_timer_pipe_is_not_made_where_others_could_replace_it(owner: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777 if owner == 0 else 0o755)
    os.chown(shared, owner, -1)
    env = plain_environment(TORCHELASTIC_ENABLE_FILE_TIMER="1", TORCHELASTIC_TIMER_FILE=str(shared / "pipe"))
    done = run(script(tmp_path, "pass"), env=env)
    assert done.code != 0
    assert not (shared / "pipe").exists()


NOISY = "import sys; print('out'); print('err', file=sys.stderr); raise ValueError('x')\n"


def test_logs_are_private_whatever_the_umask(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    before = os.umask(0)
    try:
        done = run("--log-dir", str(logs), "--redirects", "3", script(tmp_path, NOISY))
    finally:
        os.umask(before)
    assert done.code == 1
    found = [tmp_path / "new", logs, *logs.rglob("*")]
    assert {"stdout.log", "stderr.log", "error.json"} <= {path.name for path in found}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {path: mode for path, mode in modes.items() if path.is_dir() and mode != 0o700} == {}
    private = {path for path in found if path.name != "failure.json"}
    assert {path: mode for path, mode in modes.items() if path in private and mode & 0o077} == {}


def test_a_log_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o755)
    assert run("--log-dir", str(logs), script(tmp_path, "pass")).code == 0
    assert stat.S_IMODE(logs.stat().st_mode) == 0o755
