"""Shared by all tests: nothing may be left behind, and how long is 'hung'."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import psutil
import pytest
from hypothesis import settings

settings.register_profile("phalanx", deadline=None)  # on a busy machine an example may take any time
settings.load_profile("phalanx")

# A test run in the background of a shell, or under nohup, inherits ignored signals; so would every process
# that a test starts.
for _signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal is signal.SIGINT else signal.SIG_DFL)

# Newer versions of libffi open a file with the first callback, for good: not in the middle of a test.
ctypes.CFUNCTYPE(None)(lambda: None)

# Seconds; no claim about speed, only about ever coming back, on a machine with ten times as much to do as it
# can. More where many trials share one.
HUNG = float(os.environ.get("HUNG", "120"))
_ENDING = HUNG / 2  # for what ends by itself; shorter than the sleep of any process in a test


def has_ipv6() -> bool:
    """Whether this machine has a loopback address of IPv6; many containers have none."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


def wait_until(condition: Callable[[], object], what: str, timeout: float = HUNG) -> None:
    """For facts that no event announces (a process of somebody else's is gone): look until true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout:.0f} s: {what}")
        select.select([], [], [], 0.005)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody reaped yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _descendants() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if not gone(p.pid)}


def _fds() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            pass
    return found


@contextmanager
def as_nobody() -> Iterator[Path]:
    """A folder of root's that this process may not write to: as somebody without privileges, for a while.

    What is needed within must be imported before: nobody may not read everything.
    """
    folder = Path(mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    try:
        yield folder
    finally:
        if root:
            os.setresuid(0, 0, 0)
        for path, _, _ in os.walk(folder):  # without privileges, a locked directory could not be removed
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        rmtree(folder)


def drop_privileges() -> None:
    """Within `as_nobody`; undone at its end."""
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """After every test: no new process, thread or descriptor. Its home and temp directory are its own."""
    private = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(private))
    monkeypatch.setattr("tempfile.tempdir", None)
    # Nothing of the user's or of another test's is seen: neither their files nor their running jobs.
    (private / "home").mkdir()
    monkeypatch.setenv("HOME", str(private / "home"))
    monkeypatch.setenv("PHALANX_NAMESPACE", f"test-{os.urandom(8).hex()}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(private / "cache"))  # no lists of modules in somebody's home
    monkeypatch.setenv("XDG_STATE_HOME", str(private / "state"))  # nor lists of runs
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # a line about another Python than the tests'
        monkeypatch.delenv(name, raising=False)
    # With it every piece of a print is a write of its own, and those of two ranks end up in one line.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if request.node.get_closest_marker("untraced"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    processes, threads, fds = _descendants(), set(threading.enumerate()), _fds()
    yield
    wait_until(
        lambda: _descendants() <= processes, f"the end of processes {_descendants() - processes}", _ENDING
    )
    wait_until(
        lambda: {t for t in threading.enumerate() if t.is_alive()} <= threads,
        f"the end of threads {set(threading.enumerate()) - threads}",
        _ENDING,
    )
    new = {fd: where for fd, where in _fds().items() if fd not in fds}
    # pytest's own capture files come and go.
    leaked = {fd: where for fd, where in new.items() if str(Path(where)) and "pytest" not in where}
    assert not leaked, f"descriptors left open: {leaked}"


# Variables that decide how a job runs that a test starts in this process: of Phalanx and torchrun, of a
# scheduler's or Kubernetes' own job, and proxies for what is asked on this machine.
_SURROUNDINGS = re.compile(
    "(PHALANX|PET|TORCHELASTIC|TORCH_ELASTIC|SLURM|KUBERNETES)_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$"
    "|MASTER_(ADDR|PORT)$|(?i:(all|https?|ftp)_proxy$)"
)
_FOR_TESTS = re.compile("PHALANX_(TEST_PYTHON|PICTURES|WRITE_DOCS|WRITE_GOLDEN|GOLDEN)$")


def pytest_configure() -> None:
    """Remove the surroundings; not at import, which a worker may do that runs a function of a test module."""
    for name in [name for name in os.environ if _SURROUNDINGS.match(name) and not _FOR_TESTS.match(name)]:
        del os.environ[name]


def _torch_is(*version: int) -> bool:
    """Whether the installed torch is this version or a later one."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return tuple(map(int, installed("torch").split(".")[:2])) >= version
    except PackageNotFoundError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`long` tests only with -m long, `newest_torch` only with it; they are not skipped but left out."""
    absent = set() if "long" in (config.getoption("-m") or "") else {"long"}
    if not _torch_is(2, 15):
        absent.add("newest_torch")
    left_out = [item for item in items if any(map(item.get_closest_marker, absent))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
