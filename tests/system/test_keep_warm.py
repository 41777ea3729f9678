"""`--warm-for`: the next launch uses the zygote of the last one, nobody can tell, nothing else is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from phalanx.agent.warm.keep_warm import ask, connect, names
from phalanx.helpers import job_cgroup
from phalanx.helpers.kept_zygote import memory_is_short
from phalanx.helpers.messages import Describe, EndKept, KeptDescription
from tests.conftest import HUNG, drop_privileges, gone, wait_until
from tests.support.run_helpers import PHALANX, Running, plain_environment, run

KEEP = ("--warm-for", "5m")
MAIN = f"train-{os.getpid()}.py"
SLOW = f"slow-{os.getpid()}.py"
CPU = min(os.sched_getaffinity(0))  # one that this machine lets us have
HEAVY = "asyncio, decimal, email.message, http.client, sqlite3, unittest.mock, xml.dom.minidom"


class Kept:
    """The kept zygotes of one test's scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> dict[str, KeptDescription]:
        """Name → what it says about itself."""
        own = [name for name in names() if name.endswith("/" + MAIN)]  # those of others may be stopped
        found = {name: ask(name, Describe(), HUNG) for name in own}
        return {
            name: one
            for name, one in found.items()
            if one is not None and one.script.startswith(str(self.folder))
        }

    def one(self) -> list[int]:
        """The pids of keeper and zygote, once there is one."""
        wait_until(self.all, "a kept zygote")
        ((_, kept),) = self.all().items()
        return kept.pids

    def stop(self) -> None:
        for name, kept in self.all().items():
            ask(name, EndKept(), HUNG)
            wait_until(lambda: all(gone(pid) for pid in kept.pids), "its end")  # noqa: B023


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    found = Kept(tmp_path)
    yield found
    found.stop()


def written(tmp_path: Path, text: str, name: str = MAIN) -> str:
    path = tmp_path / name
    path.write_text(dedent(text))
    return str(path)


def env(tmp_path: Path, **more: str) -> dict[str, str]:
    return plain_environment(XDG_CACHE_HOME=str(tmp_path / "cache"), **more)


PARENT = "import os, sys\nprint('parent', os.getppid(), sys.argv[1:], flush=True)\n"


def parents(text: str) -> set[int]:
    """The zygotes of the workers."""
    return {int(number) for number in re.findall(r"parent (\d+)", text)}


def launch(main: str, tmp_path: Path, *words: str, **more: str) -> int:
    """The zygote of a launch that ends well."""
    done = run(*KEEP, *words, main, env=env(tmp_path, **more), cwd=tmp_path)
    assert done.code == 0, done
    (zygote,) = parents(done.out)
    return zygote


def test_the_next_launch_uses_the_zygote_of_the_last_one(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    zygote = launch(main, tmp_path, "--nproc-per-node", "2")
    assert kept.one()[1] == zygote
    for arguments in ([], ["other", "arguments"]):
        done = run(*KEEP, "--nproc-per-node", "2", main, *arguments, env=env(tmp_path), cwd=tmp_path)
        assert done.code == 0
        assert parents(done.out) == {zygote}
        assert done.out.count(str(arguments)) == 2
    keeper, zygote = kept.one()
    assert psutil.Process(zygote).ppid() == keeper
    assert psutil.Process(zygote).children() == []


def test_a_launch_without_the_option_neither_uses_nor_leaves_one(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    done = run(main, env=env(tmp_path), cwd=tmp_path)
    assert kept.all() == {}
    zygote = launch(main, tmp_path)
    done = run(main, env=env(tmp_path), cwd=tmp_path)
    assert parents(done.out) != {zygote}
    assert launch(main, tmp_path) == zygote
    done = run("--warm-for", "off", main, env=env(tmp_path, PHALANX_WARM_FOR="5m"), cwd=tmp_path)
    assert parents(done.out) != {zygote}
    done = run(main, env=env(tmp_path, PHALANX_WARM_FOR="5m"), cwd=tmp_path)
    assert parents(done.out) == {zygote}


def test_modules_of_the_first_launch_are_there_in_the_next(kept: Kept, tmp_path: Path) -> None:
    """The zygote of a first launch has imported nothing: another one is left behind, which has."""
    main = written(
        tmp_path, f"import sys\nbefore = set(sys.modules)\nimport {HEAVY}\n{PARENT}print(len(before))\n"
    )
    first = launch(main, tmp_path)
    assert kept.one()[1] != first
    done = run(*KEEP, main, env=env(tmp_path), cwd=tmp_path)
    assert parents(done.out) == {kept.one()[1]}
    assert int(done.out.splitlines()[-1]) > 100


# -- nobody can tell --------------------------------------------------------------------------------

SNAPSHOT = """\
import gc, json, locale, os, resource, signal, sys, threading
def read(name):
    try:
        return open("/proc/self/" + name).read()
    except OSError:
        return None
def stream(s):
    return [s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.name, s.mode]
status = dict(line.split(":", 1) for line in read("status").splitlines())
keep = ("Umask Uid Gid Groups SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp "
        "Cpus_allowed Mems_allowed Threads THP_enabled").split()
files = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        files[fd] = os.readlink("/proc/self/fd/" + fd)
    except OSError:
        pass
tty = read("stat").rpartition(")")[2].split()[4]
state = dict(
    status={name: status.get(name) for name in keep},
    environ={k: v for k, v in os.environ.items()
             if k not in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "PHALANX_WORKER", "PHALANX_STATE",
                          "PHALANX_COLLECTIVES", "PHALANX_REENTRY", "TORCHELASTIC_ERROR_FILE")},
    proc={name: read(name) for name in ("limits", "cgroup", "oom_score_adj", "timerslack_ns", "personality",
                                        "coredump_filter", "sessionid", "loginuid", "attr/current")},
    namespaces={n: os.readlink("/proc/self/ns/" + n) for n in sorted(os.listdir("/proc/self/ns"))},
    cwd=os.getcwd(), leader=os.getsid(0) == os.getpid() == os.getpgrp(), tty=tty,
    nice=os.getpriority(0, 0), policy=os.sched_getscheduler(0), affinity=sorted(os.sched_getaffinity(0)),
    limits={n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    streams=[stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
    standard=sorted((fd, name.partition("[")[0]) for fd, name in files.items() if int(fd) < 3),
    argv=sys.argv, orig=sys.orig_argv[-2:], path=sys.path, flags=str(sys.flags), executable=sys.executable,
    main=sorted(k for k in globals() if k.startswith("__")), file=__file__,
    handlers={s: str(signal.getsignal(s)) for s in sorted(signal.valid_signals())},
    locale=locale.setlocale(locale.LC_ALL), threads=threading.active_count(), gc=gc.get_threshold(),
    comm=read("comm"), hooks=[str(sys.excepthook), len(sys.meta_path)],
)
open(os.environ["WHERE"] + os.environ["RANK"], "w").write(json.dumps(state, default=str))
print("parent", os.getppid(), [], flush=True)
"""


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two snapshots differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for key in sorted({*one, *other})
            for found in unlike(one.get(key), other.get(key), f"{where}/{key}")
        ]
    return [] if one == other else [f"{where}: {one!r} != {other!r}"]


@pytest.mark.untraced
@pytest.mark.parametrize("terminal", [False, True])
def test_a_worker_cannot_tell_a_kept_zygote_from_a_cold_start(
    terminal: bool, kept: Kept, tmp_path: Path
) -> None:
    main = written(tmp_path, SNAPSHOT)
    (tmp_path / "found").mkdir()
    environ = env(tmp_path, WHERE=str(tmp_path / "found" / "of"), TERM="xterm")
    assert run(*KEEP, "--nproc-per-node", "2", main, env=environ).code == 0
    zygote = kept.one()[1]
    found = []
    for words in (["--warm", "off"], KEEP):
        with Running([*words, "--nproc-per-node", "2", main], env=environ, terminal=terminal) as job:
            done = job.end()
        assert done.code == 0, done
        found.append([json.loads((tmp_path / "found" / f"of{rank}").read_text()) for rank in range(2)])
    assert parents(done.out) == {zygote}
    for rank in range(2):
        cold, warm = found[0][rank], found[1][rank]
        cold["hooks"][1] = warm["hooks"][1]  # rank 0 records its imports
        for one in (cold, warm):  # each zygote has a control group of its own, where there are any
            one["proc"]["cgroup"] = re.sub(r"/phalanx-[\d.-]+", "", one["proc"]["cgroup"])
        assert unlike(cold, warm) == []


@pytest.mark.parametrize(
    ("before", "more", "expression", "value"),
    [
        ("umask 027", {}, "oct(os.umask(0))", "0o27"),
        ("ulimit -Sn 200", {}, "__import__('resource').getrlimit(7)[0]", "200"),
        ("ulimit -c 0; nice -n 3 true", {"SETTING": "new"}, "os.environ.get('SETTING')", "new"),
        ("cd /", {}, "os.getcwd()", "/"),
        ("exec nice -n 3", {}, "os.getpriority(0, 0) - int(os.environ['NICE'])", "3"),
        ("echo 300 > /proc/self/oom_score_adj", {}, "open('/proc/self/oom_score_adj').read().strip()", "300"),
        (f"exec taskset -c {CPU}", {}, "sorted(os.sched_getaffinity(0))", f"[{CPU}]"),
        ("exec unshare --uts", {}, "'a namespace'", "a namespace"),
    ],
)
def test_other_surroundings_get_a_zygote_of_their_own(
    before: str, more: dict[str, str], expression: str, value: str, kept: Kept, tmp_path: Path
) -> None:
    if "unshare" in before and os.geteuid():
        pytest.skip("a namespace needs privileges")
    if "taskset" in before and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one processor")
    main = written(tmp_path, f"{PARENT}print('value', {expression}, flush=True)\n")
    nice = str(os.getpriority(os.PRIO_PROCESS, 0))
    zygote = launch(main, tmp_path, NICE=nice)
    lead, command = ("", f"{before} ") if before.startswith("exec") else (f"{before}; ", "exec ")
    words = f"{lead}{command}{shlex.join([*PHALANX, *KEEP, main])}"
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", words],
            env=env(tmp_path, NICE=nice, **more),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
        )
        assert done.returncode == 0, done
        assert zygote not in parents(done.stdout)
        assert f"value {value}" in done.stdout
        zygote = 0  # the second time it is their own


# -- what is left -----------------------------------------------------------------------------------


def test_a_pipeline_ends_with_the_job_and_nothing_of_it_is_held(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    words = shlex.join([*PHALANX, *KEEP, "--nproc-per-node", "2", main])
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", f"{words} 2>&1 | cat"],
            env=env(tmp_path),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            timeout=HUNG,
            check=False,
        )
        assert "all workers succeeded" in done.stdout
        for pid in kept.one():
            process = psutil.Process(pid)
            assert process.cwd() == "/"
            assert process.terminal() is None
            open_files = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)}
            assert open_files == {"/dev/null"}


@pytest.mark.parametrize("how", ["failure", "interrupt"])
def test_a_job_that_fails_or_is_interrupted_leaves_one_as_well(how: str, kept: Kept, tmp_path: Path) -> None:
    end = "sys.exit(3)" if how == "failure" else "import time; time.sleep(1000)"
    main = written(tmp_path, f"{PARENT}{end}\n")
    with Running([*KEEP, main], env=env(tmp_path)) as job:
        job.read_until("parent")
        if how == "interrupt":
            job.signal(signal.SIGINT)
        assert job.end().code == (3 if how == "failure" else 130)
    (zygote,) = parents(job.text)
    assert kept.one()[1] == zygote


def test_of_two_launches_at_once_one_gets_it(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, f"{PARENT}sys.stdin.read()\n")
    with Running([*KEEP, main], env=env(tmp_path)) as job:
        (zygote,) = parents(job.end().out)
    kept.one()
    first = Running([*KEEP, main], env=env(tmp_path), stdin=subprocess.PIPE)
    second = Running([*KEEP, main], env=env(tmp_path), stdin=subprocess.PIPE)
    with first, second:
        for job in (first, second):
            job.read_until("parent")
        found = [parents(job.text) for job in (first, second)]
        assert sorted({zygote} == one for one in found) == [False, True]
        for job in (first, second):
            assert job.process.stdin is not None
            job.process.stdin.close()
            assert job.end().code == 0
    wait_until(lambda: len(kept.all()) == 1, "one of the two is left")


def test_a_stopped_zygote_is_passed_over(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    zygote = launch(main, tmp_path)
    pids = kept.one()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        done = run(*KEEP, main, env=env(tmp_path), cwd=tmp_path)
        assert done.code == 0
        assert parents(done.out) != {zygote}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert launch(main, tmp_path) == zygote  # nothing has happened to it


FAMILY = """\
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", os.environ["RANK"], os.getpid(), flush=True)
print("child", child.pid, flush=True)
if "stay" in sys.argv:
    time.sleep(1000)
child.kill()
child.wait()
"""


@pytest.mark.parametrize("stopped", [[], [0], [1], [0, 1]], ids=["running", "keeper", "zygote", "both"])
def test_an_agent_that_is_killed_leaves_nothing(stopped: list[int], kept: Kept, tmp_path: Path) -> None:
    """Not even where keeper or zygote, which are not its children, are stopped at that moment."""
    main = written(tmp_path, FAMILY)
    assert run(*KEEP, "--nproc-per-node", "2", main, env=env(tmp_path)).code == 0
    pids = kept.one()
    with Running([*KEEP, "--nproc-per-node", "2", main, "stay"], env=env(tmp_path)) as job:
        workers = job.workers(2)
        job.read_until("child ", 2)
        assert psutil.Process(workers[0]).ppid() == pids[1]
        children = [int(line.split()[-1]) for line in job.text.splitlines() if "child" in line]
        for which in stopped:
            os.kill(pids[which], signal.SIGSTOP)
        job.signal(signal.SIGKILL)
        everything = [*pids, *workers.values(), *children]
        wait_until(lambda: all(gone(pid) for pid in everything), f"the end of {everything}")
    assert kept.all() == {}


@pytest.mark.parametrize("victim", [0, 1], ids=["keeper", "zygote"])
def test_helpers_that_are_killed_are_replaced(victim: int, kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, FAMILY)
    assert run(*KEEP, main, env=env(tmp_path)).code == 0
    pids = kept.one()
    with Running([*KEEP, "--max-restarts", "1", main, "stay"], env=env(tmp_path)) as job:
        (worker,) = job.workers(1).values()
        assert psutil.Process(worker).ppid() == pids[1]
        os.kill(pids[victim], signal.SIGKILL)
        job.read_until("ready", 2)
        (again,) = job.workers(1).values()
        assert psutil.Process(again).ppid() != pids[1]
        wait_until(lambda: all(gone(pid) for pid in (*pids, worker)), "the end of all that")
        job.signal(signal.SIGTERM)
        job.end()


def test_it_ends_when_it_is_idle(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    done = run("--warm-for", "0.5s", main, env=env(tmp_path))
    (zygote,) = parents(done.out)
    wait_until(lambda: gone(zygote), "its end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whom", [0, 1], ids=["keeper", "zygote"])
def test_the_usual_signals_end_it(number: int, whom: int, kept: Kept, tmp_path: Path) -> None:
    launch(written(tmp_path, PARENT), tmp_path)
    pids = kept.one()
    os.kill(pids[whom], number)
    wait_until(lambda: all(gone(pid) for pid in pids), "its end")


@pytest.mark.parametrize("how", ["installed", "edited"])
def test_it_ends_at_a_change_of_packages(how: str, kept: Kept, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    module = packages / "some_package.py"
    module.write_text("VALUE = 1\n")
    main = written(tmp_path, f"import some_package\n{PARENT}print('value', some_package.VALUE)\n")
    more = {"PYTHONPATH": str(packages)}
    zygote = launch(main, tmp_path, "--preload", "some_package", **more)
    assert kept.one()[1] == zygote
    if how == "installed":
        (packages / "another.py").touch()
    else:
        module.write_text("VALUE = 22\n")
    wait_until(lambda: gone(zygote), "its end")
    done = run(*KEEP, "--preload", "some_package", main, env=env(tmp_path, **more), cwd=tmp_path)
    assert f"value {1 if how == 'installed' else 22}" in done.out


def warm(*words: str) -> subprocess.CompletedProcess[str]:
    command = [PHALANX[0], "warm", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=False)


def test_the_command_lists_and_stops_them(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    launch(main, tmp_path)
    pids = kept.one()

    listed = warm(main).stdout
    assert listed.startswith(f"{main}: pid {pids[1]}, ")
    assert " MB, kept for " in listed
    assert ", ends in " in listed
    assert f"{main}: pid {pids[1]}" in warm().stdout
    stopped = warm(main, "--stop")
    assert stopped.stdout == f"stopped {main} (pid {pids[1]})\n"
    assert all(gone(pid) for pid in pids)
    assert warm(main).stderr == f"phalanx warm: nothing is kept warm for {main}\n"


def test_one_that_still_imports_is_listed_passed_over_and_stopped(kept: Kept, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    hold = tmp_path / "hold"
    (packages / "tqdm.py").write_text(
        f"import os, time\nwhile os.path.exists({str(hold)!r}): time.sleep(0.01)\n"
    )
    main = written(
        tmp_path,
        f"{PARENT}import {HEAVY}, tqdm\nopen({str(hold)!r}, 'w').close()\n",
        SLOW,
    )
    more = {"PYTHONPATH": str(packages)}
    assert launch(main, tmp_path, **more)
    wait_until(lambda: any(name.endswith("/" + SLOW) for name in names()), "one that imports")
    listed = warm(main).stdout
    assert listed.endswith(" MB, not ready: it still imports\n")
    pid = int(listed.partition("pid ")[2].partition(",")[0])
    assert not gone(pid)
    assert warm(main, "--stop").stdout == f"stopped {SLOW} (pid {pid})\n"
    wait_until(lambda: gone(pid), "its end")
    hold.unlink()


@pytest.mark.skipif(not job_cgroup.base(), reason="control groups cannot be written here")
def test_a_kept_zygote_is_alone_in_its_control_group_and_the_next_worker_starts_there(
    kept: Kept, tmp_path: Path
) -> None:
    main = written(tmp_path, FAMILY)
    groups = set()
    for _ in range(2):
        with Running([*KEEP, main, "stay"], env=env(tmp_path)) as job:
            (worker,) = job.workers(1).values()
            groups.add(Path(f"/proc/{worker}/cgroup").read_text().rpartition("0::")[2].strip())
            job.signal(signal.SIGTERM)
            job.end()
        (group,) = groups
        inside = Path(job_cgroup.base(), Path(group).name, "cgroup.procs").read_text()
        assert inside.split() == [str(kept.one()[1])]


def test_memory_is_short_by_what_is_available_and_by_how_long_tasks_wait(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()

    def short(available: int, stalled: float) -> bool:
        (tmp_path / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
        (tmp_path / "pressure" / "memory").write_text(
            f"some avg10=99.00 avg60=0 avg300=0 total=1\nfull avg10={stalled} avg60=0 avg300=0 total=1\n"
        )
        return memory_is_short(str(tmp_path))

    assert not short(500, 0.0)
    assert short(50, 0.0)
    assert short(500, 30.0)
    assert not memory_is_short(str(tmp_path / "missing"))


def test_another_user_is_not_answered(kept: Kept, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to be another user")
    launch(written(tmp_path, PARENT), tmp_path)
    kept.one()
    (name,) = kept.all()
    child = os.fork()
    if child == 0:
        drop_privileges()
        refused = connect(name) is None  # its own check of the other side
        import socket

        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(HUNG)
            sock.connect(name)
            try:
                refused = refused and sock.recv(1) == b""
            except ConnectionError:
                pass
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    kept.one()


def test_nonsense_does_not_disturb_it(kept: Kept, tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    zygote = launch(main, tmp_path)
    kept.one()
    (name,) = kept.all()
    for junk in (b"", b"\0", b"\xff" * 100, b"\5\0\0\0\0\0\0\0xxxxx"):
        sock = connect(name)
        assert sock is not None
        sock.setblocking(True)
        sock.sendall(junk)
        sock.close()
    assert launch(main, tmp_path) == zygote


def test_bad_times_are_refused(tmp_path: Path) -> None:
    main = written(tmp_path, PARENT)
    unknown, bounds = "not a duration; write 30, 30s, 10m, 1h30m or 1d", "must be between 0 and 1d"
    for value in ("ten", "-1", "nan", "2d", "25h", "m"):
        done = run("--warm-for", value, main)
        assert done.code == 2
        why = unknown if value in ("ten", "nan", "m") else bounds
        assert done.err == f"phalanx run: --warm-for {value}: {why}, or off\n"
    done = run("--warm-for", "1m", "--warm", "off", main)
    assert done.err == "phalanx run: --warm-for 1m: there is nothing to keep with --warm off\n"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "times", [pytest.param(10, id="few"), pytest.param(200, id="many", marks=pytest.mark.long)]
)
def test_many_launches_do_not_grow(times: int, kept: Kept, tmp_path: Path) -> None:
    """Memory, descriptors and processes of what is kept; the results are the same."""
    main = written(tmp_path, PARENT)
    zygote = launch(main, tmp_path, "--nproc-per-node", "2")
    launch(main, tmp_path, "--nproc-per-node", "2")
    before = _least(kept.one())
    for _ in range(times):
        assert launch(main, tmp_path, "--nproc-per-node", "2") == zygote
    after = _least(kept.one())
    assert after[0] == before[0]
    assert after[1] <= before[1] + (1 << 20) + (times << 12)


def _least(pids: list[int]) -> tuple[list[list[str]], int]:
    """Of several looks: the connection of a launch or of a question ends a moment after it."""
    return min((_sizes(pids) for _ in range(20)), key=lambda sizes: sum(map(len, sizes[0])))


def _sizes(pids: list[int]) -> tuple[list[list[str]], int]:
    """Kinds of descriptors, and bytes of memory."""
    files = [
        sorted(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd"))
        for pid in pids
    ]
    assert psutil.Process(pids[1]).children() == []
    return files, sum(psutil.Process(pid).memory_info().rss for pid in pids)


def test_torch_is_there_at_once(kept: Kept, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    main = written(
        tmp_path, f"import sys\nearly = 'torch' in sys.modules\nimport torch\n{PARENT}print('early', early)\n"
    )
    launch(main, tmp_path, "--preload", "torch")
    zygote = kept.one()[1]
    done = run(*KEEP, "--preload", "torch", main, env=env(tmp_path), cwd=tmp_path)
    assert parents(done.out) == {zygote}
    assert "early True" in done.out
