"""`phalanx run` in odd surroundings: closed streams, deleted directories, limits, names, endpoints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from phalanx.core.exit_codes import UNFIT_NODE
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, READY, Ended, Running, ended, plain_environment, run, script
from tests.system.hostile_user import as_root


def in_shell(text: str, *words: str, cwd: Path) -> Ended:
    """Run under a shell; `text` is a line with RUN in it."""
    line = text.replace("RUN", shlex.join([*PHALANX, *words]))
    return ended(["bash", "-c", line], plain_environment(TMPDIR=str(cwd)), cwd)


# ---- where the output is -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-r3", "-t3", "--redirects=0:1"])
def test_files_that_nobody_named_are_named_at_the_start(option: str, tmp_path: Path) -> None:
    env = plain_environment(TMPDIR=str(tmp_path))
    ended = run(option, script(tmp_path, "print('text')"), env=env)
    found = re.search(r", output in (\S+)$", ended.said[0])
    assert found is not None, ended
    (log,) = Path(found[1]).glob("*/attempt_0/0/stdout.log")
    assert log.read_text() == "text\n"


@as_root  # anybody else finds that /proc cannot be written, and uses /tmp
@pytest.mark.parametrize(("words", "code"), [([], UNFIT_NODE), (["-t", "3"], 2)])
def test_a_temporary_directory_that_cannot_be_used_is_named_with_what_to_do(
    words: list[str], code: int, tmp_path: Path
) -> None:
    ended = run(*words, script(tmp_path, ""), env=plain_environment(TMPDIR="/proc"))
    assert ended.code == code, ended
    assert "can be made in /proc (No such file or directory); set TMPDIR to a directory" in ended.err
    assert "Traceback" not in ended.err


def test_no_place_is_named_that_holds_nothing_or_is_known(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    for words in ([], ["-t3", "--log-dir", str(tmp_path / "logs")]):
        assert "output in" not in run(*words, path).err


# ---- streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [">&-", ">/dev/full", "<&- >&- 2>&-"])
def test_a_detached_run_starts_also_when_nobody_can_be_told(closed: str, tmp_path: Path) -> None:
    path = script(tmp_path, "import os; print('ran', os.getppid())")
    ended = in_shell(f"RUN {closed}", "--detach", path, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, ""), ended
    (log,) = tmp_path.glob("phalanx-*.out")
    wait_until(lambda: "all workers succeeded" in log.read_text(), "the end of the run in the background")
    helper = int(log.read_text().split("ran ")[1].split()[0])
    wait_until(lambda: gone(helper), "the end of its helpers")


def test_what_cannot_work_is_said_before_it_is_detached(tmp_path: Path) -> None:
    ended = run("--detach", "--event-log-handler", "nosuch", script(tmp_path, ""), cwd=tmp_path)
    assert ended.code == 2, ended
    assert "no such handler" in ended.err


@pytest.mark.parametrize("warm", ["auto", "off"])  # without warmth the agent has no other reason to wake up
@pytest.mark.parametrize("where", ["| true", ">/dev/full"])
def test_a_console_that_is_gone_is_not_waited_for(where: str, warm: str, tmp_path: Path) -> None:
    path = script(tmp_path, "print('text'); raise SystemExit(7)")
    words = ["--warm", warm, "--log-dir", str(tmp_path / "logs"), "-t3", path]
    ended = in_shell(f"set -o pipefail; RUN {where}", *words, cwd=tmp_path)
    assert ended.code == 7, ended
    about = [line for line in ended.said if "output" in line or "stdout" in line]
    full = "stdout: No space left on device: some worker output was not shown; see the log files"
    assert about == ([full] if where == ">/dev/full" else []), ended
    assert [log.read_text() for log in tmp_path.glob("logs/*/attempt_0/0/stdout.log")] == ["text\n"]


def test_a_console_that_is_only_slow_gets_everything(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys; sys.stdout.write('text\\n' * 400_000)\nopen('done', 'w').close()")
    # Nothing is taken for longer than one step of the agent's patience, once the worker is through.
    reader = "{ until [ -e done ]; do sleep 0.05; done; sleep 1.5; wc -l; }"
    ended = in_shell(f"set -o pipefail; RUN | {reader}", "--warm=off", "-t3", path, cwd=tmp_path)
    assert (ended.code, ended.out.strip()) == (0, "400000"), ended
    assert len(ended.said) == 2, ended


def test_a_worker_whose_output_nobody_reads_has_lost_no_peer(tmp_path: Path) -> None:
    path = script(tmp_path, "while True: print('text')")
    ended = in_shell("set -o pipefail; RUN | head -1", path, cwd=tmp_path)
    assert (ended.code in (1, 120), ended.out) == (True, "text\n"), ended  # 120: by Python itself, at its end
    assert "Root cause: rank 0" in ended.err
    assert "check the pipe's reader" in ended.err
    assert "other nodes" not in ended.err


@pytest.mark.parametrize("python", ["ours", "another"])
def test_a_script_that_does_not_parse(python: str, tmp_path: Path) -> None:
    path = script(tmp_path, "import os\ndef f(:\n")
    # -x is no flag that we could imitate: Python runs as it stands, without a line of ours.
    words = ["-r3", path] if python == "ours" else ["-r3", "--no-python", sys.executable, "-x", path]
    ended = run(*words)
    assert ended.code == 1, ended
    assert "SyntaxError: invalid syntax" in ended.said[1]
    assert f"Next step  {path}:2\n" in ended.err, ended


def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    full = in_shell("RUN >/dev/full", "--dry-run", path, cwd=tmp_path)
    assert (full.code, full.said) == (
        1, ["the plan cannot be written to stdout: No space left on device"],
    ), full  # fmt: skip
    # The reader is gone before the plan comes.
    cut = in_shell("exec 3> >(exec true); wait $!; RUN >&3; echo code $?", "--dry-run", path, cwd=tmp_path)
    assert (cut.out, cut.err) == ("code 0\n", ""), cut


def test_a_plan_names_files_by_their_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xffd.py")
    (tmp_path / name).touch()
    done = subprocess.run(
        [*PHALANX, "--dry-run", name],
        env=plain_environment(PYTHONIOENCODING="utf-8:strict"),
        cwd=tmp_path,
        capture_output=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == 0, done
    assert b"b\xffd.py'" in done.stdout


# ---- the terminal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.stdout.write('raw'), time.sleep(1000)"])
def test_the_terminal_is_left_as_it_was(end: str, tmp_path: Path) -> None:
    """A worker that dies at a prompt of its own, as pdb's with readline, leaves it without echo."""
    code = f"{READY}import tty; sys.stdin.readline(); tty.setraw(0); print('raw', flush=True); {end}"
    with Running(["--attach", "0", "--grace", "0", script(tmp_path, code)], terminal=True) as job:
        job.workers(1)
        before = termios.tcgetattr(job.terminal)
        job.type(b"go\n")
        job.read_until("raw")
        job.signal(signal.SIGTERM)
        job.end()
        assert termios.tcgetattr(job.terminal) == before


# ---- limits and places ---------------------------------------------------------------------------------


def test_too_few_descriptors_are_said_in_one_line(tmp_path: Path) -> None:
    ended = in_shell("ulimit -n 9; exec RUN", script(tmp_path, ""), cwd=tmp_path)
    assert ended.code == UNFIT_NODE, ended
    (line,) = ended.err.splitlines()
    assert "cannot be started" in line
    assert "ulimit -n" in line


@pytest.mark.parametrize("limit", [24, 50, 64, 100])
def test_too_few_descriptors_for_so_many_workers(limit: int, tmp_path: Path) -> None:
    """With the limits here the agent itself, its helper, or only its console would run out of them."""
    words = ["--nproc-per-node=40", "-t3", script(tmp_path, "print('ran')")]
    ended = in_shell(f"ulimit -n {limit}; exec RUN", *words, cwd=tmp_path)
    assert (ended.code, ended.out) == (UNFIT_NODE, ""), ended
    (line,) = [line for line in ended.said if "40 workers" not in line] or [ended.err]
    assert re.match(rf"too many open files: raise ulimit -n \({limit} here, about \d+ needed\)", line), ended
    enough = re.search(r"about (\d+) needed", line)
    assert enough is not None
    ended = in_shell(f"ulimit -n {enough[1]}; exec RUN", *words, cwd=tmp_path)
    assert (ended.code, ended.out.count("ran")) == (0, 40), ended


@pytest.mark.parametrize(
    "words", [["train.py"], ["--dry-run", "SCRIPT"], ["--detach", "SCRIPT"], ["-m", "x"]]
)
def test_a_deleted_directory_is_bad_usage(words: list[str], tmp_path: Path) -> None:
    path = script(tmp_path, "")
    there = [path if word == "SCRIPT" else word for word in words]
    ended = in_shell("mkdir gone; cd gone; rmdir ../gone; RUN", *there, cwd=tmp_path)
    assert ended.code == 2, ended
    assert ended.err == "phalanx run: the current directory has been deleted; cd to one that exists\n"


def test_unknown_signals_are_said_once(tmp_path: Path) -> None:
    told = "import os; print(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])"
    ended = run("--signals-to-handle", "SIGTERM,SIGFOO", script(tmp_path, told))
    assert (ended.code, ended.out) == (0, "SIGTERM\n"), ended
    assert sum("SIGFOO" in line for line in ended.err.splitlines()) == 1, ended


def test_verbose_repeats_nothing(tmp_path: Path) -> None:
    ended = run("--verbose", "--max-restarts", "1", script(tmp_path, "raise SystemExit(3)"))
    assert ended.code == 3, ended
    assert sum("restart 1 of 1" in line for line in ended.said) == 1, ended


# ---- endpoints -----------------------------------------------------------------------------------------


def test_a_static_endpoint_is_the_workers_too(tmp_path: Path) -> None:
    """As under torchrun: with static, where nodes meet is where workers meet."""
    port = free_port()
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    words = ["--rdzv-endpoint", f"localhost:{port}", script(tmp_path, code)]
    ended = run(*words)
    assert (ended.code, ended.out) == (0, f"localhost {port}\n"), ended
    assert f"MASTER_PORT={port} " in run("--dry-run", *words).out


# A container: nothing can be written but a small /tmp, /dev/shm has 64 MB, and there is no home.
CONTAINER = """
mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm &&
mount -t tmpfs -o size=8m tmpfs "$1" && mount -o remount,ro,bind / && cd / && shift && exec "$@"
"""


def test_a_container_with_a_read_only_root(tmp_path: Path) -> None:
    enter = ["unshare", "--mount", "bash", "-c", CONTAINER, "-", str(tmp_path)]
    if os.geteuid() or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    text = "import os; print('wrote', os.access('/', os.W_OK), flush=True)"
    words = ["--nproc-per-node", "2", "--no-python", sys.executable, "-c", text]
    env = plain_environment(TMPDIR=str(tmp_path), HOME="/nonexistent", XDG_CACHE_HOME="/nonexistent/cache")
    done = ended([*enter, *PHALANX, "-t", "3", *words], env)
    assert done.code == 0, done
    assert done.out.count("wrote False") == 2, done
    assert len(done.said) == 2, "the first line and the last"
