"""Warm workers: forked from a Python that has imported what they need, and parked ahead of a restart."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.warm.import_cache import ImportCache
from phalanx.agent.warm.spawner import Spawner
from phalanx.core.group.group import Phase
from phalanx.helpers.messages import Exit, GroupStopped, WorkerLaunch
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import zygote_below

# Modules of the standard library that no helper needs for itself.
HEAVY = ["sqlite3", "xml.dom.minidom", "decimal"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_one(spawner: Spawner, script: Path, *args: str, rank: int = 0) -> int:
    """Run one worker to its end; its exit code."""
    job = WorkerLaunch(rank, program=("script", str(script), list(args)))
    spawner.spawn([job], os.environ)
    return ends(spawner, 1)[0].code


def ends(spawner: Spawner, count: int) -> list[Exit]:
    found: list[Exit] = []
    while len(found) < count:
        found += [event for event in spawner.events(HUNG) if isinstance(event, Exit)]
    return found


@pytest.fixture
def helpers() -> Iterator[Any]:
    made: list[Spawner] = []

    def make(**kwargs: Any) -> Spawner:
        made.append(Spawner("python", **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def script(tmp_path: Path, text: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


REPORT = f"import sys, json; json.dump({{m: m in sys.modules for m in {HEAVY}}}, open(sys.argv[1], 'w'))\n"


def test_preloaded_modules_are_there_before_the_first_line(helpers: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    spawner = helpers(preload=HEAVY)
    assert run_one(spawner, script(tmp_path, REPORT), str(out)) == 0
    assert json.loads(out.read_text()) == dict.fromkeys(HEAVY, True)
    assert spawner.log.seconds is not None


@pytest.mark.untraced
def test_without_a_list_nothing_is_there_early(helpers: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run_one(helpers(), script(tmp_path, REPORT), str(out)) == 0
    assert json.loads(out.read_text()) == dict.fromkeys(HEAVY, False)


def test_the_users_own_modules_are_never_preloaded(helpers: Any, tmp_path: Path) -> None:
    """Not even when they are on sys.path and the list names them: edited code is always picked up."""
    mine = script(tmp_path, "VALUE = 1\n", "my_own_module.py")
    main = script(tmp_path, "import sys, my_own_module; sys.exit(my_own_module.VALUE)\n")
    spawner = helpers(preload=["my_own_module"])
    assert run_one(spawner, main) == 1
    mine.write_text("VALUE = 22\n")
    assert run_one(spawner, main) == 22


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "thread"),
        ("import socket; keep = socket.socket()", "socket"),
        ("raise RuntimeError('no')", "RuntimeError"),
        ("import os; os._exit(3)", "ended the process"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended the process"),
        ("import sys; sys.exit(4)", "SystemExit"),
        ("import os; RANK = int(os.environ.get('RANK', 0))", "reads RANK"),
        ("import os; keep = os.pipe()", "opens pipe:"),
        ("import subprocess; keep = subprocess.Popen(['sleep', '1000'])", "starts a process"),
        ("import tempfile; keep = tempfile.TemporaryFile()", "(deleted)"),
        ("import signal; signal.signal(signal.SIGUSR1, print)", "sets a handler of SIGUSR1"),
        ("import sys; sys.path.append('/odd')", "edits sys.path"),
        ("import os; os.umask(0o27)", "changes the umask"),
        ("import unproven", "imports unproven, which is not on the list"),
        ("import idna", "imports idna, which is left to the workers"),
    ],
)
def test_a_package_that_does_not_suit_a_fork_is_left_to_the_workers(
    text: str, said: str, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version of one on the list, say. The zygote gives up, and the workers start cold."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "tqdm.py").write_text(text + "\n")
    (packages / "idna.py").write_text("")
    (packages / "unproven.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    out = tmp_path / "out.json"
    spawner = helpers(preload=["!idna", "tqdm", *HEAVY])
    assert run_one(spawner, script(tmp_path, REPORT), str(out)) == 0
    assert json.loads(out.read_text()) == dict.fromkeys(HEAVY, False)
    package, why = spawner.log.refused()
    assert package == "tqdm"
    assert said in why
    again = helpers(preload=["!tqdm", *HEAVY])
    assert run_one(again, script(tmp_path, REPORT), str(out)) == 0
    assert json.loads(out.read_text()) == dict.fromkeys(HEAVY, True)


def test_what_the_user_names_may_import_what_is_not_on_the_list(
    helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "mine.py").write_text("import unproven\n")
    (packages / "unproven.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    main = script(tmp_path, "import sys; sys.exit(sum(n in sys.modules for n in ('mine', 'unproven')))\n")
    assert run_one(helpers(preload=["*mine"]), main) == 2
    assert run_one(helpers(preload=["mine"]), main) == 0


def test_helpers_that_are_importing_can_be_closed_at_once(
    helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    pid_file = tmp_path / "pid"
    (packages / "endless.py").write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages))
    spawner = helpers(preload=["*endless"])
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the import")
    spawner.close()
    assert gone(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONDEVMODE", "1"), ("PYTHONWARNINGS", "error"), ("PYTHONWARNDEFAULTENCODING", "1")],
)
@pytest.mark.parametrize("parks", [0, 1])
def test_warnings_are_about_the_workers_own_doing(
    name: str, value: str, parks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv(name, value)
    path = script(tmp_path, "import gc, sys; gc.collect(); print('done', file=sys.stderr)")
    spawner = Spawner("python", preload=[])
    try:
        if parks:
            spawner.park(parks)
            parked(spawner, parks)
        jobs = [WorkerLaunch(rank, program=("script", str(path), [])) for rank in range(2)]
        spawner.spawn(jobs, os.environ)
        assert [end.code for end in ends(spawner, 2)] == [0, 0]
    finally:
        spawner.close()
    assert capfd.readouterr().err == "done\n" * 2


def test_siblings_differ_where_fresh_processes_would(helpers: Any, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    text = """
    import json, os, random, sys, tempfile, uuid
    import numpy
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    values = [random.random(), float(numpy.random.rand()), str(uuid.uuid4()), name, os.urandom(4).hex()]
    json.dump(values, open(sys.argv[1] + os.environ["RANK"], "w"))
    """
    import textwrap

    main = script(tmp_path, textwrap.dedent(text))
    spawner = helpers(preload=["random", "numpy.random", "uuid", "tempfile"])
    jobs = []
    for rank in range(3):
        job = WorkerLaunch(rank, program=("script", str(main), [str(tmp_path / "values")]))
        job.env = {"RANK": str(rank)}
        jobs.append(job)
    spawner.spawn(jobs, os.environ)
    assert all(end.code == 0 for end in ends(spawner, 3))
    columns = zip(*(json.loads((tmp_path / f"values{rank}").read_text()) for rank in range(3)), strict=True)
    for column in columns:
        assert len(set(column)) == 3, column


def launched(main: Path, *words: str, **env: str) -> int:
    """Run a script as one worker, by the command; its exit code."""
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "-q", *words, str(main)]
    done = subprocess.run(command, env={**os.environ, **env}, timeout=HUNG, stderr=subprocess.DEVNULL)
    return done.returncode


def siblings(spawner: Spawner, main: Path, folder: Path, count: int = 3) -> list[Any]:
    """What so many ranks have written as JSON into the file that they are given."""
    jobs = []
    for rank in range(count):
        job = WorkerLaunch(rank, program=("script", str(main), [str(folder / f"said{rank}")]))
        job.env = {"RANK": str(rank)}
        job.stdout = str(folder / f"stdout{rank}")
        jobs.append(job)
    spawner.spawn(jobs, os.environ)
    assert all(end.code == 0 for end in ends(spawner, count))
    return [json.loads((folder / f"said{rank}").read_text()) for rank in range(count)]


def test_what_an_interpreter_notes_at_an_import_is_each_siblings_own(helpers: Any, tmp_path: Path) -> None:
    text = """
import json, logging, multiprocessing, os, sys, threading
record = logging.LogRecord("", 0, "", 0, "", (), None)
json.dump({
    "key": bytes(multiprocessing.current_process().authkey).hex(),
    "started": record.created - record.relativeCreated / 1000,
    "thread": threading.main_thread().native_id == os.getpid(),
    "name": open("/proc/self/comm").read().strip(),
}, open(sys.argv[1], "w"))
"""
    spawner = helpers(preload=["logging", "multiprocessing", "threading"])
    run_one(spawner, script(tmp_path, "pass\n", "first.py"))  # so that the imports are done by now
    began = time.time()
    said = siblings(spawner, script(tmp_path, text), tmp_path)
    assert len({one["key"] for one in said}) == 3
    for one in said:
        assert one["started"] > began - 0.001  # the clock of the records is rounded
        assert one["thread"]
        assert one["name"] == os.path.basename(sys.executable)[:15]


def test_torchs_random_numbers_differ_between_siblings(helpers: Any, tmp_path: Path) -> None:
    """As in fresh processes, which seed it from the system; with a seed of the program's own they agree."""
    pytest.importorskip("torch")
    text = """
import json, sys, torch
first = float(torch.rand(1))
torch.manual_seed(3)
json.dump([first, torch.initial_seed(), float(torch.rand(1))], open(sys.argv[1], "w"))
"""
    said = siblings(helpers(preload=["torch"]), script(tmp_path, text), tmp_path)
    assert len({one[0] for one in said}) == 3
    assert len({tuple(one[1:]) for one in said}) == 1


def test_what_an_import_leaves_behind_is_every_workers(
    helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    data = script(tmp_path, "abcdef", "data")
    (packages / "lasting.py").write_text(
        "import os, threading\n"
        "os.environ['SET_BY_IMPORT'] = 'yes'\n"
        "os.environ.setdefault('GIVEN', 'by the import')\n"
        "os.environ.pop('TAKEN_BY_IMPORT')\n"
        f"file = open({str(data)!r}, 'rb', buffering=0)\n"
        "file.read(1)\n"
        "print('imported')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("TAKEN_BY_IMPORT", "x")
    monkeypatch.setenv("GIVEN", "before")
    text = """
import ctypes, json, os, sys
early = "lasting" in sys.modules
import lasting
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
names = ["SET_BY_IMPORT", "GIVEN", "TAKEN_BY_IMPORT"]
json.dump([early, [os.environ.get(n) for n in names], [str(libc.getenv(n.encode())) for n in names],
           lasting.file.read(2).decode(), lasting.file.read().decode()], open(sys.argv[1], "w"))
print("running")
"""
    main = script(tmp_path, text)
    for said in siblings(helpers(preload=["*lasting"]), main, tmp_path):
        assert said == [True, ["yes", "before", None], ["b'yes'", "b'before'", "None"], "bc", "def"]
    for rank in range(3):
        assert (tmp_path / f"stdout{rank}").read_text() == "imported\nrunning\n"


def listed_package(tmp_path: Path, text: str = "", name: str = "tqdm") -> str:
    """A site-packages whose package has a name of the list; its directory."""
    packages = tmp_path / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / f"{name}.py").write_text(text)
    return str(packages)


@pytest.mark.untraced
def test_a_module_of_the_scripts_own_hides_the_installed_one_at_every_start(tmp_path: Path) -> None:
    """Also where it is a package that imports it."""
    env = {"PYTHONPATH": listed_package(tmp_path, "import idna\n")}
    listed_package(tmp_path, "MINE = 0\n", "idna")
    text = "import sys\nearly = 'tqdm' in sys.modules\nimport tqdm, idna\n"
    main = script(tmp_path, text + "sys.exit(40 + 2 * idna.MINE + early)\n")
    assert [launched(main, **env) for _ in range(2)] == [41, 41]
    mine = script(tmp_path, "MINE = 1\n", "idna.py")
    assert [launched(main, **env) for _ in range(3)] == [42, 42, 42]
    mine.unlink()
    assert launched(main, **env) == 41


@pytest.mark.parametrize(
    ("line", "early"),
    [
        ("os.environ['TQDM_X'] = 'mint'", 1),
        ("os.environ.setdefault('TQDM_X', 'mint')", 1),
        ("os.environ['OTHER'] = os.environ['END']; os.environ['TQDM_X'] = 'mint'", 1),
        ("os.environ['TQDM_X'] = 'mi' + os.environ['END']", 0),
        ("if True:\n    os.environ['TQDM_X'] = 'mint'", 0),
        ("os.environ['TQ' + 'DM_X'] = 'mint'", 0),
        ("def choose():\n    os.environ['TQDM_X'] = 'mint'\nchoose()", 0),
        ("import chooser", 0),
        ("import chooser_of_names", 0),
    ],
)
def test_a_variable_set_before_an_import_is_seen_by_it_at_every_start(
    line: str, early: int, tmp_path: Path
) -> None:
    """Imported ahead only where it is certain what the variable is going to be."""
    env = {"END": "nt", "PYTHONPATH": listed_package(tmp_path, "import os\nX = os.environ.get('TQDM_X')\n")}
    script(tmp_path, "import os\ndef choose(): os.environ['TQDM_X'] = 'mint'\nchoose()\n", "chooser.py")
    script(tmp_path, "import os\nname = 'TQDM_X'\nos.environ[name] = 'mint'\n", "chooser_of_names.py")
    text = "import os, sys\nearly = 'tqdm' in sys.modules\nset_before = 'TQDM_X' in os.environ\n"
    text += f"{line}\nimport tqdm\nassert not set_before\nsys.exit(40 + 2 * (tqdm.X == 'mint') + early)\n"
    main = script(tmp_path, text)
    assert [launched(main, **env) for _ in range(2)] == [42 + early, 42 + early]


def test_a_newer_version_that_reads_a_variable_which_the_script_sets_is_left_out(tmp_path: Path) -> None:
    env = {"PYTHONPATH": listed_package(tmp_path, "import os\nX = os.environ.get('NEW_NAME')\n", "idna")}
    text = "import os, sys\nearly = 'idna' in sys.modules\n"
    text += "if len(sys.argv) < 9: os.environ['NEW_NAME'] = 'yes'\n"
    main = script(tmp_path, text + "import idna\nsys.exit(40 + 2 * (idna.X == 'yes') + early)\n")
    assert [launched(main, **env) for _ in range(2)] == [42, 42]


def test_a_package_that_was_refused_once_is_not_tried_again(tmp_path: Path) -> None:
    main = script(tmp_path, "import tqdm, idna\n", "a.py")
    first = ImportCache(["script", str(main)], os.environ)
    assert first.first_lines() == ["-a", "tqdm", "idna"]
    first.add(["tqdm.auto", "idna.layers"])
    first.refuse("tqdm", "leaves 1 thread running")
    first.save()
    again = ImportCache(["script", str(main)], os.environ)
    again.allow(["elsewhere"])
    assert again.first_lines() == ["!tqdm", "-a", "-cache/", "idna"]
    assert again.modules() == ["idna.layers"]


def test_a_package_that_was_refused_for_what_the_user_names_now_is_tried_again(tmp_path: Path) -> None:
    main = script(tmp_path, "import tqdm, idna\n", "a.py")
    found = ImportCache(["script", str(main)], os.environ)
    found.refuse("tqdm", "imports mine, which is not on the list of proven packages")
    found.refuse("idna", "imports mine_too, which is not on the list of proven packages")
    found.allow(["mine"])
    assert found.first_lines() == ["!idna", "-a", "tqdm"]


def test_a_fork_of_helpers_in_the_background_has_the_usual_priority(helpers: Any, tmp_path: Path) -> None:
    spawner = helpers(preload=HEAVY, background=True)
    text = "import json, os, sys; json.dump(os.getpriority(0, 0), open(sys.argv[1], 'w'))\n"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert siblings(spawner, script(tmp_path, text), tmp_path, 1) == [own]


@pytest.mark.untraced
def test_a_worker_records_what_it_imports_later_and_the_list_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"PYTHONPATH": listed_package(tmp_path)}
    monkeypatch.syspath_prepend(env["PYTHONPATH"])  # the package directories belong to the list's key
    main = script(
        tmp_path,
        "import sys\nearly = 'tqdm' in sys.modules\nprint('here')\nimport tqdm\nsys.exit(40 + early)\n",
    )
    assert launched(main, **env) == 40
    learned = ImportCache(["script", str(main)], os.environ)
    assert "tqdm" in learned.modules()
    assert (learned.first_lines(), "&tqdm" in learned.all_lines()) == ([], True)
    assert launched(main, **env) == 40, "a start does not wait for what comes after output"
    main.write_text(main.read_text().replace("print('here')\n", ""))
    assert [launched(main, **env), launched(main, "--warm", "off", **env)] == [41, 40]


def test_a_list_belongs_to_one_script_and_one_set_of_packages(tmp_path: Path) -> None:
    first = ImportCache(["script", str(tmp_path / "a.py")], os.environ)
    first.add(["decimal", "decimal", "bad\tname", "json"])
    first.save()
    assert ImportCache(["script", str(tmp_path / "a.py")], os.environ).seen == ["decimal", "json"]
    assert ImportCache(["script", str(tmp_path / "b.py")], os.environ).seen == []
    assert ImportCache(["script", str(tmp_path / "a.py"), "-O"], os.environ).seen == []
    assert first.path is not None
    Path(first.path).write_bytes(Path(first.path).read_bytes()[:-5])
    assert ImportCache(["script", str(tmp_path / "a.py")], os.environ).seen == []


# -- parked processes -------------------------------------------------------------------------------


def parked(spawner: Spawner, count: int) -> None:
    def there() -> bool:
        spawner.events(0)
        return len(spawner.parked) == count

    wait_until(there, f"{count} parked processes")


PID = """
import os, sys
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    file.write(f"{os.getpid()} {os.getpriority(0, 0)}")
"""


def zygote_children(spawner: Spawner) -> set[int]:
    zygote = zygote_below(spawner.pid)
    return {child.pid for child in zygote.children()}


def test_a_parked_process_becomes_the_worker(helpers: Any, tmp_path: Path) -> None:
    spawner = helpers()
    spawner.park(2)
    parked(spawner, 2)
    waiting = zygote_children(spawner)
    assert len(waiting) == 2
    jobs = []
    for rank in range(3):  # one more than there are
        job = WorkerLaunch(rank, program=("script", str(script(tmp_path, PID)), [str(tmp_path / "pid")]))
        job.env = {"RANK": str(rank)}
        jobs.append(job)
    pids = spawner.spawn(jobs, os.environ)
    assert all(end.code == 0 for end in ends(spawner, 3))
    assert waiting < set(pids.values())
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for rank in range(3):
        assert (tmp_path / f"pid{rank}").read_text() == f"{pids[rank]} {own}"


def test_parked_processes_are_not_part_of_a_group(helpers: Any, tmp_path: Path) -> None:
    """A stop is complete although they are there, and they outlive it."""
    spawner = helpers()
    sleeper = script(tmp_path, "import threading; threading.Event().wait()\n")
    spawner.spawn([WorkerLaunch(0, program=("script", str(sleeper), []))], os.environ)
    spawner.park(1)
    parked(spawner, 1)
    spawner.stop(signal.SIGTERM, HUNG)
    events: list[Any] = []
    while not any(isinstance(event, GroupStopped) for event in events):
        events += spawner.events(HUNG)
    assert len(zygote_children(spawner)) == 1


def test_a_parked_process_that_dies_is_forgotten(helpers: Any, tmp_path: Path) -> None:
    spawner = helpers()
    spawner.park(1)
    parked(spawner, 1)
    (pid,) = zygote_children(spawner)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid), "its end")
    assert run_one(spawner, script(tmp_path, "import sys; sys.exit(6)\n")) == 6


def test_parked_processes_end_with_the_helpers(helpers: Any) -> None:
    spawner = helpers()
    spawner.park(2)
    parked(spawner, 2)
    waiting = zygote_children(spawner)
    spawner.close()
    assert all(gone(pid) for pid in waiting)


def test_a_warm_up_runs_in_the_parked_process_and_its_descriptors_stay(
    helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device would: opened before the hand-over, used after it."""
    (tmp_path / "warm_up_hook.py").write_text(
        "import os\nfds = []\n"
        "def warm():\n"
        "    fds.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(30))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    main = script(
        tmp_path,
        "import os, sys, warm_up_hook\n"
        "assert len(warm_up_hook.fds) == 30\n"
        "for fd in warm_up_hook.fds: assert os.readlink(f'/proc/self/fd/{fd}') == '/dev/null', fd\n"
        "sys.exit(9)\n",
    )
    spawner = helpers()
    spawner.park(1, "warm_up_hook:warm")
    parked(spawner, 1)
    assert run_one(spawner, main) == 9


def test_a_warm_up_that_fails_is_not_tried_for_ever(helpers: Any, tmp_path: Path) -> None:
    spawner = helpers()
    assert run_one(spawner, script(tmp_path, "import sys; sys.exit(5)\n")) == 5
    for _ in range(6):
        spawner.park(1, "no_such_module:warm")
    wait_until(lambda: not zygote_children(spawner), "the end of the failed ones")
    assert run_one(spawner, script(tmp_path, "import sys; sys.exit(6)\n")) == 6


# -- through the command ----------------------------------------------------------------------------


KILLED_ONCE = """
import os, sys, threading
with open(sys.argv[1], "a") as log:
    log.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Event().wait()
"""


@pytest.mark.parametrize("mode", ["off", "auto", "standby"])
def test_a_killed_worker_comes_back(mode: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    main = script(tmp_path, KILLED_ONCE)
    words = ["run", "--warm", mode, "--nproc-per-node", "2", "--max-restarts", "1", "-q", str(main), str(log)]
    job = subprocess.Popen([sys.executable, "-m", "phalanx", *words])
    try:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2, "both workers")
        victim = int(log.read_text().split()[1])
        if mode == "standby":
            agent = psutil.Process(job.pid)
            wait_until(lambda: len(agent.children(recursive=True)) >= 6, "parked processes")
        os.kill(victim, signal.SIGKILL)
        assert job.wait(HUNG) == 0
    finally:
        job.kill()
        job.wait()
    assert sorted(line.split()[0] for line in log.read_text().splitlines()) == ["0", "0", "1", "1"]


RESTARTS = pytest.mark.parametrize(
    "times", [pytest.param(20, id="few"), pytest.param(1000, id="many", marks=pytest.mark.long)]
)


@RESTARTS
def test_many_warm_starts_leak_nothing(times: int, helpers: Any, tmp_path: Path) -> None:
    """The same result every time, and the zygote neither grows nor keeps descriptors."""
    spawner = helpers(preload=HEAVY)
    main = script(tmp_path, "import decimal, sys\nsys.exit(int(decimal.Decimal('6') * 7))\n")
    assert run_one(spawner, main) == 42
    zygote = zygote_below(spawner.pid)
    memory, fds = zygote.memory_info().rss, zygote.num_fds()
    for turn in range(times):
        if turn % 3 == 0:
            spawner.park(1)
        assert run_one(spawner, main) == 42
    # A process that is being parked has a descriptor or two more for a moment.
    wait_until(lambda: zygote.num_fds() <= fds + len(zygote_children(spawner)), "no more descriptors")
    assert zygote.memory_info().rss < memory + (8 << 20)


def wait_until_ready(helpers: HelperPool) -> None:
    """Until the helpers in the background report that they are ready, which is an event of the loop."""
    while helpers._next is not None and helpers._next.importing:
        poll = select.poll()
        for fd, mask in helpers.fds(Phase.RUNNING):
            poll.register(fd, mask)
        assert poll.poll(HUNG * 1000), "no report"
        helpers.look(Phase.RUNNING, 0.0)


SLOW_IN_HELPERS = """
import os, sys, time
if open("/proc/self/comm").read() == "worker-zygote\\n":  # in a helper
    open({began!r}, "w").close()
    while not os.path.exists({go_on!r}):
        time.sleep(0.01)
"""


def test_a_restart_never_waits_for_helpers_that_are_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes those of the last start; the better ones serve the start after."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    began, go_on = tmp_path / "began", tmp_path / "go on"
    (packages / "tqdm.py").write_text(SLOW_IN_HELPERS.format(began=str(began), go_on=str(go_on)))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
    helpers = HelperPool("python", "auto", learned)
    try:
        first = helpers.take("python")

        class Context:
            nprocs = 1
            options = SimpleNamespace(boards=None)

            def imported(self) -> list[str]:
                return ["tqdm", *(f"sqlite3.extra{n}" for n in range(30))]

        helpers.started(Context(), 0.0)  # type: ignore[arg-type]
        helpers.look(Phase.RUNNING, 5.0)
        wait_until(began.exists, "the import in the background")
        assert helpers.take("python") is first
        assert first is not None
        assert run_one(first, script(tmp_path, "import sys; sys.exit(6)\n")) == 6
        go_on.touch()
        wait_until_ready(helpers)
        second = helpers.take("python")
        assert second is not None
        assert second is not first
        early = "import sys; sys.exit('tqdm' in sys.modules)\n"
        assert run_one(second, script(tmp_path, early)) == 1
    finally:
        helpers.close()


def test_imports_in_the_background_step_aside_for_workers_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processors are few. They go on when a worker has imported its own."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    began, go_on, late = tmp_path / "began", tmp_path / "go on", tmp_path / "late"
    slow = SLOW_IN_HELPERS.format(began=str(began), go_on=str(go_on))
    (packages / "tqdm.py").write_text(slow.replace('"w").close()', '"a").write("!")'))
    (packages / "idna.py").write_text(f"open({str(late)!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
    helpers = HelperPool("python", "auto", learned, spare=0)
    names = ["tqdm", "idna", *(f"sqlite3.extra{n}" for n in range(30))]
    context: Any = SimpleNamespace(
        nprocs=1, options=SimpleNamespace(boards=None), imported=lambda: list(names)
    )
    try:
        first = helpers.take("python")
        helpers.started(context, 0.0)
        helpers.look(Phase.RUNNING, 2.0)
        assert helpers._next is None, "the worker may still be importing"
        helpers.look(Phase.RUNNING, 2.5)
        better = helpers._next
        assert better is not None
        wait_until(began.exists, "the import in the helper")
        assert helpers.take("python") is first
        assert first is not None
        go_on.touch()
        wait_until(lambda: better.log is not None and better.log.importing == "idna", "the next module")
        assert run_one(first, script(tmp_path, "import sys; sys.exit(6)\n")) == 6
        assert not late.exists()
        helpers.started(context, 10.0)
        names.append("decimal")
        helpers.look(Phase.RUNNING, 12.0)
        assert not late.exists()
        helpers.look(Phase.RUNNING, 12.5)
        wait_until_ready(helpers)
        assert late.exists()
    finally:
        helpers.close()


def test_helpers_that_end_between_two_starts_are_replaced_by_bare_ones(tmp_path: Path) -> None:
    """Others with the list would make the start wait for their imports."""
    learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
    learned.add(HEAVY)
    helpers = HelperPool("python", "auto", learned)
    try:
        first = helpers.take("python")
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: select.select([first.fileno()], [], [], 0)[0] and first.events(0), "its end")
        second = helpers.take("python")
        assert second is not None
        assert (second is first, second.preload) == (False, [])
    finally:
        helpers.close()


def test_warmth_keeps_the_better_helpers_for_the_next_start(tmp_path: Path) -> None:
    """Bare helpers first; a second set with the learned list in the background; the restart takes it."""
    learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
    helpers = HelperPool("python", "auto", learned)
    try:
        first = helpers.take("python")

        class Context:
            nprocs = 1
            options = SimpleNamespace(boards=None)

            def imported(self) -> list[str]:
                return [f"sqlite3.extra{n}" for n in range(30)] + HEAVY

        helpers.started(Context(), 0.0)  # type: ignore[arg-type]
        due = helpers.deadline(Phase.RUNNING)
        assert due is not None
        assert helpers.deadline(Phase.JOINING) is None, "a deadline that cannot be acted on wakes the loop"
        helpers.look(Phase.RUNNING, due)
        wait_until_ready(helpers)
        second = helpers.take("python")
        assert second is not first
        assert second is not None
        assert {f"&{name}" for name in HEAVY} <= set(second.preload)
        out = tmp_path / "out.json"
        assert run_one(second, script(tmp_path, REPORT), str(out)) == 0
        assert json.loads(out.read_text()) == dict.fromkeys(HEAVY, True)
    finally:
        helpers.close()


def test_threads_that_end_at_a_fork_are_no_obstacle(helpers: Any, tmp_path: Path) -> None:
    """OpenBLAS keeps a pool of threads, and ends it when the process forks: numpy may be preloaded."""
    pytest.importorskip("numpy")
    env = {"OPENBLAS_NUM_THREADS": "4"}
    os.environ.update(env)
    try:
        spawner = helpers(preload=["numpy"])
        text = "import sys\nready = 'numpy' in sys.modules\nimport numpy\n"
        text += "x = numpy.ones((300, 300))\nassert (x @ x)[0, 0] == 300\nsys.exit(30 + ready)\n"
        assert run_one(spawner, script(tmp_path, text)) == 31
        assert spawner.log.seconds is not None
    finally:
        for name in env:
            del os.environ[name]


def test_signal_handlers_of_a_forked_worker_are_pythons_own(helpers: Any, tmp_path: Path) -> None:
    text = "import signal, sys\nok = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    text += "ok = ok and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    text += "ok = ok and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL\nsys.exit(int(ok))\n"
    assert run_one(helpers(), script(tmp_path, text)) == 1


def test_a_node_that_waits_keeps_its_standbys_parked(tmp_path: Path) -> None:
    """A spare, or the first of two nodes: parked before any round, and gone with it when it is stopped."""
    main = script(tmp_path, "pass\n")
    words = [
        "run",
        "--warm",
        "standby",
        "--nproc-per-node",
        "3",
        "--nnodes",
        "2",
        "--rdzv-backend",
        "phalanx",
    ]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-q", str(main)]
    env = {**os.environ, "PHALANX_TOKEN": "secret"}
    job = subprocess.Popen([sys.executable, "-m", "phalanx", *words], env=env, stderr=subprocess.DEVNULL)
    try:
        agent = psutil.Process(job.pid)
        # Keeper, zygote, and one for each local rank.
        wait_until(lambda: len(agent.children(recursive=True)) == 5, "three parked processes")
        waiting = [child.pid for child in agent.children(recursive=True)]
        job.send_signal(signal.SIGTERM)
        assert job.wait(HUNG) == 143
        assert all(gone(pid) for pid in waiting)
    finally:
        job.kill()
        job.wait()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_thousand_warm_starts_of_a_torch_worker(helpers: Any, tmp_path: Path) -> None:
    """Every one computes what a cold start computes; the zygote neither grows nor keeps descriptors."""
    pytest.importorskip("torch")
    text = """
import sys, torch
torch.manual_seed(3)
a = torch.randn(64, 64)
print(float((a @ a.T).sum()), float(torch.rand(1)))
"""
    main = script(tmp_path, text)
    cold = subprocess.run([sys.executable, str(main)], capture_output=True, text=True, check=True).stdout
    spawner = helpers(preload=["torch"])
    out = tmp_path / "out"

    def warm() -> str:
        job = WorkerLaunch(0, program=("script", str(main), []))
        job.stdout = str(out)
        out.unlink(missing_ok=True)
        spawner.spawn([job], os.environ)
        assert ends(spawner, 1)[0].code == 0
        return out.read_text()

    assert warm() == cold
    zygote = zygote_below(spawner.pid)
    memory, fds = zygote.memory_info().rss, zygote.num_fds()
    for _ in range(1000):
        assert warm() == cold
    assert zygote.num_fds() == fds
    assert zygote.memory_info().rss < memory + (16 << 20)


def test_the_answer_to_a_late_stop_is_not_taken_for_the_next_groups(helpers: Any, tmp_path: Path) -> None:
    """Asked to stop twice, answered twice; the second answer comes when the next group is starting."""
    spawner = helpers()
    job = WorkerLaunch(0, program=("script", str(script(tmp_path, "pass\n")), []))
    spawner.spawn([job], os.environ)
    ends(spawner, 1)
    spawner.stop(signal.SIGTERM, 1)
    spawner.stop(signal.SIGTERM, 1)
    spawner.spawn([job], os.environ)
    events: list[Any] = []
    while not any(isinstance(event, Exit) for event in events):
        events += spawner.events(HUNG)
    assert not any(isinstance(event, GroupStopped) for event in events)
