"""One pass over a list finds every module that does not suit a fork; no start waits for one that may not."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.core.group import Phase
from phalanx.warm.helper_pool import HelperPool
from phalanx.warm.import_cache import ImportCache
from phalanx.zygote.spawner import Exit, Spawner, WorkerLaunch
from tests.conftest import HUNG, wait_until
from tests.support.run_helpers import FOREVER, Running, plain_environment, run, script
from tests.support.vet import vet

THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
COUNTED = "open({log!r}, 'a').write(__name__ + '\\n')\n"
# In a helper, which hides the variables of a worker, it never ends.
ENDLESS_IN_HELPERS = """
import os, time
if b"RANK" not in os.environb._data:
    open({began!r}, "w").close()
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def preloaded(packages: Path, tmp_path: Path) -> Iterator[Any]:
    """Helpers that have imported a list."""
    made: list[Spawner] = []

    def make(*names: str, **kwargs: Any) -> Spawner:
        made.append(Spawner("python", preload=list(names), **kwargs))
        while made[-1].importing:
            made[-1].events(HUNG)
        return made[-1]

    yield make
    for spawner in made:
        spawner.close()


def loaded(spawner: Spawner, tmp_path: Path, *names: str) -> list[str]:
    """Which of these a worker finds imported before its first line."""
    out = tmp_path / "loaded"
    text = f"import sys; open({str(out)!r}, 'w').write(' '.join(n for n in {names} if n in sys.modules))"
    spawner.spawn([WorkerLaunch(0, program=("script", script(tmp_path, text, "look.py"), []))], os.environ)
    while not any(isinstance(event, Exit) for event in spawner.events(HUNG)):
        pass
    return out.read_text().split()


def write(packages: Path, log: Path, **modules: str) -> None:
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(COUNTED.format(log=str(log)) + text)


def test_ten_modules_that_leave_threads_cost_one_pass(preloaded: Any, packages: Path, tmp_path: Path) -> None:
    """Not one pass for each of them: one, and one in a twin; what comes before and after is preloaded."""
    log = tmp_path / "log"
    bad = {f"threads{number}": THREAD for number in range(10)}
    write(packages, log, before="", after="", **bad)
    spawner = preloaded("before", *bad, "after")
    assert set(spawner.log.unsuitable) == set(bad)
    assert set(spawner.log.unsuitable.values()) == {"leaves 1 thread running"}
    assert spawner.log.importers == {}
    assert loaded(spawner, tmp_path, "before", *bad, "after") == ["before", "after"]
    executed = log.read_text().split()
    assert max(executed.count(name) for name in bad) <= 2
    assert max(executed.count(name) for name in ("before", "after")) <= 4


def test_the_innermost_module_is_blamed_and_its_importers_are_skipped(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """Those that import it first, those that find it loaded, and those that would do without it."""
    missing = tmp_path / "missing"
    optional = f"try:\n    import inner\nexcept ImportError:\n    open({str(missing)!r}, 'w')\n"
    write(
        packages,
        tmp_path / "log",
        fine="",
        outer="import middle\nimport fine\n",
        middle="import inner\n",
        inner=THREAD,
        second="import inner\n",
        third="from inner import __name__ as theirs\n",
        fourth="import importlib\nimportlib.import_module('middle')\n",
        fifth=optional,
        also_fine="import fine\n",
    )
    names = ["outer", "middle", "inner", "second", "third", "fourth", "fifth", "fine", "also_fine"]
    spawner = preloaded(*names)
    assert spawner.log.unsuitable == {"inner": "leaves 1 thread running"}
    assert set(spawner.log.importers) == {"outer", "middle", "second", "third", "fourth", "fifth"}
    assert spawner.dropped == ["inner: leaves 1 thread running (so are 6 modules that import it)"]
    assert loaded(spawner, tmp_path, *names) == ["fine", "also_fine"]
    assert not missing.exists(), "an unsuitable module must not look as if it were not installed"


def test_a_module_that_needs_an_unsuitable_one_without_importing_it_is_found(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """It is an attribute of its package if it is loaded, and else the package imports it on demand."""
    log = tmp_path / "log"
    (packages / "lazy").mkdir()
    lazy = "import importlib\ndef __getattr__(name):\n    return importlib.import_module('lazy.' + name)\n"
    (packages / "lazy" / "__init__.py").write_text(lazy)
    (packages / "lazy" / "threads.py").write_text(THREAD)
    write(
        packages, log, eager="import lazy.threads\n", hidden="import lazy\nlazy.threads\n", fine="", last=""
    )
    names = ["fine", "eager", "lazy", "lazy.threads", "hidden", "last"]
    spawner = preloaded(*names)
    assert set(spawner.log.unsuitable) == {"lazy.threads"}
    assert set(spawner.log.importers) == {"eager", "hidden"}
    assert loaded(spawner, tmp_path, *names) == ["fine", "lazy", "last"]


def test_a_module_that_starts_a_thread_before_it_imports_is_blamed_itself(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    write(packages, tmp_path / "log", first=THREAD + "import second\n", second="")
    spawner = preloaded("first", "second")
    assert (spawner.log.unsuitable, spawner.log.importers) == ({"first": "leaves 1 thread running"}, {})
    assert loaded(spawner, tmp_path, "first", "second") == ["second"]


def test_a_module_that_a_package_only_looks_for_is_not_recorded(packages: Path, tmp_path: Path) -> None:
    write(
        packages,
        tmp_path / "log",
        asks="import importlib.util\nimportlib.util.find_spec('large')\n",
        large="",
    )
    main = script(tmp_path, "import asks\n")
    env = environment(packages)
    assert run(main, env=env).code == 0
    code = "import os, sys\nfrom phalanx.warm.import_cache import ImportCache\n"
    code += "print(*ImportCache(['script', sys.argv[1]], os.environ).names)\n"
    known = subprocess.run(
        [sys.executable, "-c", code, main], env=env, capture_output=True, text=True, check=True
    )
    assert "asks" in known.stdout.split()
    assert "large" not in known.stdout.split()


def test_a_module_that_only_looks_for_an_unsuitable_one_is_preloaded(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """Many packages see what is installed; that is no import. Here it comes first, and so is never blamed."""
    looks = "import importlib.util\nassert importlib.util.find_spec('threads')\n"
    write(packages, tmp_path / "log", looks=looks, threads=THREAD, user="import looks, threads\n")
    names = ["user", "looks", "threads"]
    spawner = preloaded(*names)
    assert spawner.log.unsuitable == {"threads": "leaves 1 thread running"}
    assert set(spawner.log.importers) == {"user"}
    assert loaded(spawner, tmp_path, *names) == ["looks"]
    vetted = preloaded("-threads", "-user", "looks", vetting="vetted")
    assert loaded(vetted, tmp_path, *names) == ["looks"]


def test_a_module_that_was_found_unsuitable_before_is_not_imported_again(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    write(packages, log, fine="", outer="import inner\n", inner=THREAD, last="")
    names = ["fine", "outer", "inner", "last"]
    spawner = preloaded("-inner", "-outer", *names)
    assert loaded(spawner, tmp_path, *names) == ["fine", "last"]
    assert set(log.read_text().split()) == {"fine", "last"}


def test_a_part_of_a_package_that_is_unsuitable_does_not_spoil_the_package(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    (packages / "large").mkdir()
    for name, text in {
        "__init__": "",
        "plain": "",
        "threads": THREAD,
        "user": "from . import threads",
    }.items():
        (packages / "large" / f"{name}.py").write_text(text)
    names = ["large", "large.user", "large.threads", "large.plain"]
    spawner = preloaded(*names)
    assert set(spawner.log.unsuitable) == {"large.threads"}
    assert set(spawner.log.importers) == {"large.user"}
    assert loaded(spawner, tmp_path, *names) == ["large", "large.plain"]


def test_modules_that_kill_the_process_cost_nothing_that_was_imported(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    dies = "import os\nos._exit(3)\n"
    write(
        packages, log, outer="import dies\n", dies=dies, fine="", crashes="import os\nos.abort()\n", last=""
    )
    names = ["outer", "dies", "fine", "crashes", "last"]
    spawner = preloaded(*names)
    assert spawner.log.unsuitable == {"dies": "ended the process", "crashes": "ended the process"}
    assert set(spawner.log.importers) == {"outer"}
    assert loaded(spawner, tmp_path, *names) == ["fine", "last"]


def test_a_module_that_works_in_one_process_only_is_left_out(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """It kills the process or its twin, whichever is second: nothing is known to be the same in both."""
    once = (
        "import os\n"
        f"try:\n    os.close(os.open({str(tmp_path / 'taken')!r}, os.O_CREAT | os.O_EXCL))\n"
        "except FileExistsError:\n    os._exit(3)\n"
    )
    write(packages, tmp_path / "log", once=once, fine="")
    spawner = preloaded("once", "fine")
    assert set(spawner.log.unsuitable) == {"once"}
    assert loaded(spawner, tmp_path, "once", "fine") == ["fine"]


def test_a_scout_leaves_no_process_behind(preloaded: Any, packages: Path, tmp_path: Path) -> None:
    write(
        packages,
        tmp_path / "log",
        first=THREAD,
        starts="import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n",
        last="",
    )
    spawner = preloaded("first", "starts", "last")
    assert set(spawner.log.unsuitable) == {"first", "starts"}

    def tree() -> list[str]:
        try:
            return [child.name() for child in psutil.Process(spawner.pid).children(recursive=True)]
        except psutil.NoSuchProcess:  # it has just ended
            return []

    wait_until(lambda: tree() == ["worker-zygote"], "the end of the scout")


def test_what_was_found_is_kept_although_the_preload_was_cut_short(packages: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    write(packages, tmp_path / "log", outer="import inner\n", inner=THREAD, fine="")
    (packages / "endless.py").write_text(ENDLESS_IN_HELPERS.format(began=str(began)))
    program = ["script", str(tmp_path / "s.py")]
    learned = ImportCache(program, os.environ)
    learned.add(["fine", "outer", "inner", "endless"])
    helpers = HelperPool("python", "auto", learned)
    said: list[str] = []
    helpers.say = said.append
    try:
        better = helpers._next = helpers._make_better()
        wait_until(lambda: better.log is not None and "endless" in better.log.executing, "the last import")
    finally:
        helpers.close()
    again = ImportCache(program, os.environ)
    assert again.names == ["fine", "endless"]
    assert again.first_lines() == [], "nothing is known to be suitable"
    assert said == [
        "not preloaded: inner: leaves 1 thread running (so is a module that imports it); "
        "workers will import it"
    ]


def environment(packages: Path) -> dict[str, str]:
    return plain_environment(PYTHONPATH=str(packages), XDG_CACHE_HOME=str(packages.parent / "cache"))


def test_no_launch_waits_for_modules_that_were_not_vetted(packages: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    (packages / "endless.py").write_text(ENDLESS_IN_HELPERS.format(began=str(began)))
    main = script(tmp_path, "import endless, sys\nprint('early', 'decimal' in sys.modules)\nimport decimal\n")
    env = environment(packages)
    for _ in range(3):
        ended = run(main, env=env)
        assert (ended.code, ended.out) == (0, "early False\n"), ended
    assert not began.exists()


def test_a_kill_and_a_signal_are_answered_while_helpers_import_in_the_background(
    packages: Path, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    (packages / "endless.py").write_text(ENDLESS_IN_HELPERS.format(began=str(began)))
    many = (
        "import endless, decimal, sqlite3, xml.dom.minidom, http.client, email.message, asyncio, unittest\n"
    )
    main = script(tmp_path, many + FOREVER)
    with Running(["--max-restarts", "1", main], env=environment(packages)) as job:
        (worker,) = job.workers(1).values()
        wait_until(began.exists, "the import in the background")
        os.kill(worker, signal.SIGKILL)
        job.read_until("ready 0", times=2)
        begin = time.monotonic()
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
        assert time.monotonic() - begin < HUNG / 3, "it waited for the import"


def test_a_vetted_module_that_proves_unsuitable_delays_a_start_only_by_its_import(
    packages: Path, tmp_path: Path
) -> None:
    """It depends on a variable, for example: the workers start from scratch, and the list is vetted anew."""
    (packages / "moody.py").write_text("import os\nif os.environ.get('MOOD'):\n    import moods\n")
    (packages / "moods.py").write_text(THREAD)
    main = script(
        tmp_path, "import sys\nearly = 'moody' in sys.modules\nimport moody\nsys.exit(40 + early)\n"
    )
    env = environment(packages)
    assert run(main, env=env).code == 40
    vet(main, env)
    assert run(main, env=env).code == 41
    moody = run(main, env={**env, "MOOD": "bad"})
    assert moody.code == 40
    assert "workers start without a preload: moody: leaves 1 thread running" in moody.said, moody
    assert run(main, env=env).code == 40


FIRST_LINE = """
import sys
{before}
import large
print("last", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "waits"),
    [
        ("", True),
        ("import os, logging\nlog = logging.getLogger(__name__)\nos.environ['A'] = 'b'\nSIZE = 2 ** 3", True),
        ("try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None", True),
        ("def main():\n    print('here')\nif sys.version_info < (3,):\n    import none", True),
        ("print('first', flush=True)", False),
        ("if '--help' in sys.argv:\n    sys.exit(0)", False),
        ("import argparse\nargparse.ArgumentParser().parse_args()", False),
        ("def main():\n    import large\nmain()", False),
        ("for _ in range(3):\n    pass", False),
    ],
)
def test_a_start_waits_only_for_what_the_script_imports_before_anything_else(
    before: str, waits: bool, packages: Path, tmp_path: Path
) -> None:
    text = "import os\nif os.environ.get('SLOW'):\n" + ENDLESS_IN_HELPERS.replace("\n", "\n    ")
    began = tmp_path / "began"
    (packages / "large.py").write_text(text.format(began=str(began)))
    main = script(tmp_path, FIRST_LINE.format(before=before))
    env = environment(packages)
    assert run(main, env=env).code == 0
    vet(main, env)
    with Running([main], env={**env, "SLOW": "yes"}) as job:
        if waits:
            wait_until(began.exists, "the import in the helpers")
            assert "last" not in job.text
        else:
            job.read_until("last")
            assert job.end().code == 0
            assert not began.exists()


@pytest.fixture
def crowded(packages: Path, tmp_path: Path) -> Iterator[Any]:
    """The first helpers of a launch with more workers than processors, for a list that was never tried."""
    made: list[HelperPool] = []

    def make(*lines: str) -> Spawner:
        learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
        learned.add(lines, complete=True)
        made.append(HelperPool("python", "auto", learned, spare=-1))
        spawner = made[-1].take("python")
        assert spawner is not None
        while spawner.importing:
            spawner.events(HUNG)
        return spawner

    yield make
    for pool in made:
        pool.close()


def test_more_workers_than_processors_try_a_new_list_at_once(
    crowded: Any, packages: Path, tmp_path: Path
) -> None:
    write(packages, tmp_path / "log", first="", second="")
    spawner = crowded("first", "second")
    assert loaded(spawner, tmp_path, "first", "second") == ["first", "second"]


def test_a_new_list_is_given_up_at_once_if_a_module_leaves_the_threads_that_a_worker_saw(
    crowded: Any, packages: Path, tmp_path: Path
) -> None:
    """That module is imported alone, in a fork, before the others, which take long."""
    log = tmp_path / "log"
    write(packages, log, large="import threads\n", threads=THREAD)
    spawner = crowded("large", "threads", "%threads 1")
    assert log.read_text().split() == ["threads"]
    assert loaded(spawner, tmp_path, "large", "threads") == []
    assert spawner.log.spoiled == "threads: may leave a thread running"


def test_helpers_that_gave_their_list_up_do_not_count_as_preloaded(packages: Path, tmp_path: Path) -> None:
    """Else better ones would not be made, and these be kept for the next launch."""
    write(packages, tmp_path / "log", threads=THREAD)
    learned = ImportCache(["script", str(tmp_path / "s.py")], os.environ)
    learned.add(["threads", "%threads 1"], complete=True)
    pool = HelperPool("python", "auto", learned, spare=-1)
    try:
        spawner = pool.take("python")
        assert spawner is not None
        assert spawner.preload
        while spawner.importing:
            spawner.events(HUNG)
        pool.look(Phase.STARTING, time.monotonic())
        assert spawner.preload == []
    finally:
        pool.close()


def test_threads_of_numerical_libraries_do_not_spoil_a_new_list(
    crowded: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    main = script(tmp_path, "import numpy\n")
    env = {**environment(packages), "OPENBLAS_NUM_THREADS": "3"}
    assert run(main, env=env).code == 0
    code = "import os, sys\nfrom phalanx.warm.import_cache import ImportCache\n"
    code += "print(*ImportCache(['script', sys.argv[1]], os.environ).untried_lines(), sep='\\n')\n"
    known = subprocess.run(
        [sys.executable, "-c", code, main], env=env, capture_output=True, text=True, check=True
    )
    lines = known.stdout.splitlines()
    assert [line for line in lines if line.startswith("%")], "no thread was seen"
    spawner = crowded(*lines)
    assert (spawner.log.spoiled, loaded(spawner, tmp_path, "numpy")) == ("", ["numpy"])


def test_an_edit_below_the_first_imports_keeps_the_preload(packages: Path, tmp_path: Path) -> None:
    (packages / "large.py").write_text("")
    head = "import sys\nearly = 'large' in sys.modules\n"
    main = script(tmp_path, f"{head}import large\nsys.exit(40 + early)\n")
    env = environment(packages)
    assert run(main, env=env).code == 40
    vet(main, env)
    script(tmp_path, f"{head}import large, decimal\nprint('more')\nsys.exit(40 + early)\n")
    assert run(main, env=env).code == 41
    script(tmp_path, f"{head}print('first')\nimport large\nsys.exit(40 + early)\n")
    assert [run(main, env=env).code for _ in range(2)] == [40, 40]


def test_what_a_start_waits_for_is_said(packages: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    wait = f"import os, time\nwhile not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)\n"
    (packages / "slow.py").write_text(wait)
    main = script(tmp_path, "print('here', flush=True)\n")
    env = environment(packages)
    with Running(["--preload", "slow", main], env=env) as job:
        job.read_until("the workers start when slow is imported")
        go_on.touch()
        job.read_until("here")
        assert job.end().code == 0


def test_the_garbage_collector_of_a_worker_is_as_python_sets_it(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """During a preload it rests; a module that changes it is left to the worker."""
    write(packages, tmp_path / "log", plain="", sets="import gc\ngc.set_threshold(500, 5, 5)\n")
    for names in (["plain"], ["plain", "sets"]):
        spawner = preloaded(*names)
        assert set(spawner.log.unsuitable) == set(names) - {"plain"}
        out = tmp_path / "threshold"
        text = f"import gc; open({str(out)!r}, 'w').write(str((gc.isenabled(), gc.get_threshold())))"
        job = WorkerLaunch(0, program=("script", script(tmp_path, text, "look.py"), []))
        spawner.spawn([job], os.environ)
        while not any(isinstance(event, Exit) for event in spawner.events(HUNG)):
            pass
        assert out.read_text() == str((True, gc.get_threshold()))


def test_torch_is_executed_once_beside_modules_that_leave_threads(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    bad = {f"threads{number}": "import torch\n" + THREAD for number in range(3)}
    write(packages, tmp_path / "log", **bad)
    spawner = preloaded("torch", *bad)
    assert set(spawner.log.unsuitable) == set(bad)
    assert loaded(spawner, tmp_path, "torch", *bad) == ["torch"]
