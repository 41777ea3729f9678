"""What a launch imports before its first worker: what the script imports first, if it is on the list."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.warm.import_cache import ImportCache
from phalanx.agent.warm.spawner import Spawner
from phalanx.core.group.group import Phase
from phalanx.helpers.messages import Exit, WorkerLaunch
from tests.conftest import HUNG, wait_until
from tests.support.run_helpers import FOREVER, Running, plain_environment, run, script

THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
# In a helper it never ends.
ENDLESS_IN_HELPERS = """
import os, sys, time
if open("/proc/self/comm").read() == "worker-zygote\\n":
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


def write(packages: Path, **modules: str) -> None:
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text)


def test_a_module_that_a_package_only_looks_for_is_not_recorded(packages: Path, tmp_path: Path) -> None:
    write(packages, idna="import importlib.util\nimportlib.util.find_spec('large')\n", large="")
    main = script(tmp_path, "print('first')\nimport idna\n")
    env = environment(packages)
    assert run(main, env=env).code == 0
    code = "import os, sys\nfrom phalanx.agent.warm.import_cache import ImportCache\n"
    code += "print(*ImportCache(['script', sys.argv[1]], os.environ).seen)\n"
    known = subprocess.run(
        [sys.executable, "-c", code, main], env=env, capture_output=True, text=True, check=True
    )
    assert "idna" in known.stdout.split()
    assert "large" not in known.stdout.split()


def environment(packages: Path) -> dict[str, str]:
    return plain_environment(PYTHONPATH=str(packages), XDG_CACHE_HOME=str(packages.parent / "cache"))


def test_a_kill_and_a_signal_are_answered_while_helpers_import_in_the_background(
    packages: Path, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    (packages / "tqdm.py").write_text(ENDLESS_IN_HELPERS.format(began=str(began)))
    many = "print('first')\nimport tqdm, decimal, sqlite3, xml.dom.minidom, http.client, email.message\n"
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


FIRST_LINE = """
import sys
{before}
import tqdm
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
        ("def main():\n    import tqdm\nmain()", False),
        ("for _ in range(3):\n    pass", False),
    ],
)
def test_a_start_waits_only_for_what_the_script_imports_before_anything_else(
    before: str, waits: bool, packages: Path, tmp_path: Path
) -> None:
    text = "import os\nif os.environ.get('SLOW'):\n" + ENDLESS_IN_HELPERS.replace("\n", "\n    ")
    began = tmp_path / "began"
    (packages / "tqdm.py").write_text(text.format(began=str(began)))
    main = script(tmp_path, FIRST_LINE.format(before=before))
    env = environment(packages)
    with Running([main], env={**env, "SLOW": "yes"}) as job:
        if waits:
            wait_until(began.exists, "the import in the helpers")
            assert "last" not in job.text
        else:
            job.read_until("last")
            assert job.end().code == 0
            assert not began.exists()


def test_helpers_that_gave_their_list_up_do_not_count_as_preloaded(packages: Path, tmp_path: Path) -> None:
    """Else better ones would not be made, and these be kept for the next launch."""
    write(packages, tqdm=THREAD)
    learned = ImportCache(["script", script(tmp_path, "import tqdm, idna\n")], os.environ)
    pool = HelperPool("python", "auto", learned)
    try:
        spawner = pool.take("python")
        assert spawner is not None
        assert spawner.preload
        while spawner.importing:
            spawner.events(HUNG)
        pool.look(Phase.STARTING, time.monotonic())
        assert spawner.preload == []
        assert learned.first_lines()[0] == "!tqdm"
        assert learned.first_lines()[-1] == "idna"
    finally:
        pool.close()


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
    """During a preload it rests; a package that changes it is left to the worker."""
    write(packages, idna="", tqdm="import gc\ngc.set_threshold(500, 5, 5)\n")
    for names in (["idna"], ["idna", "tqdm"]):
        spawner = preloaded(*names)
        assert (spawner.log.seconds is None) == ("tqdm" in names)
        out = tmp_path / "threshold"
        text = f"import gc; open({str(out)!r}, 'w').write(str((gc.isenabled(), gc.get_threshold())))"
        job = WorkerLaunch(0, program=("script", script(tmp_path, text, "look.py"), []))
        spawner.spawn([job], os.environ)
        while not any(isinstance(event, Exit) for event in spawner.events(HUNG)):
            pass
        assert out.read_text() == str((True, gc.get_threshold()))


def test_a_package_that_proves_unsuitable_costs_one_launch_its_preload(
    packages: Path, tmp_path: Path
) -> None:
    """It is named in a line, and the next launch preloads the others."""
    write(packages, tqdm="import os\nif os.environ.get('MOOD'):\n    import moods\n", moods=THREAD, idna="")
    text = "import sys\nfound = ('tqdm' in sys.modules) + 2 * ('idna' in sys.modules)\n"
    main = script(tmp_path, text + "import tqdm, idna\nsys.exit(40 + found)\n")
    env = environment(packages)
    assert run(main, env=env).code == 43
    moody = run(main, env={**env, "MOOD": "bad"})
    assert moody.code == 40
    line = (
        "tqdm is not preloaded: imports moods, which is not on the list of proven packages; workers import it"
    )
    assert any(line in said for said in moody.said), moody
    assert [run(main, env=env).code for _ in range(2)] == [42, 42]


def test_a_module_that_cannot_be_imported_does_not_spoil_its_package(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """A worker has tried it, too, and did without it."""
    (packages / "tqdm").mkdir()
    (packages / "tqdm" / "__init__.py").write_text("")
    (packages / "tqdm" / "optional.py").write_text("import no_such_module\n")
    (packages / "tqdm" / "gone.py").write_text("from tqdm import no_such_name\n")
    write(packages, idna="")
    spawner = preloaded("tqdm", "&tqdm.optional", "&tqdm.gone", "&tqdm.missing", "idna")
    assert loaded(spawner, tmp_path, "tqdm", "tqdm.optional", "idna") == ["tqdm", "idna"]


def test_a_module_that_a_hook_finds_elsewhere_is_not_taken_for_an_installed_one(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """As editable installs have it: their files are the user's, and may be edited at any time."""
    (tmp_path / "mine.py").write_text("")
    hook = (
        "import importlib.util as u, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mine':\n"
        f"            return u.spec_from_file_location(name, {str(tmp_path / 'mine.py')!r})\n"
        "sys.meta_path.append(Finder())\n"
    )
    write(packages, six=hook, tqdm="import mine\n", idna="")
    spawner = preloaded("six", "tqdm", "idna")
    assert spawner.log.refused() == ("tqdm", f"imports mine from {tmp_path}")
    assert loaded(spawner, tmp_path, "six", "tqdm", "idna") == []


def test_a_restart_after_a_refusal_is_warm(packages: Path, tmp_path: Path) -> None:
    """Helpers in the background make up for the launch that had to start cold."""
    write(packages, tqdm=THREAD, idna="")
    learned = ImportCache(["script", script(tmp_path, "import tqdm, idna\n")], os.environ)
    pool = HelperPool("python", "auto", learned)
    context: Any = SimpleNamespace(nprocs=1, options=SimpleNamespace(boards=None), imported=list)
    try:
        first = pool.take("python")
        assert first is not None
        assert loaded(first, tmp_path, "tqdm", "idna") == []
        now = time.monotonic()
        pool.started(context, now)
        pool.look(Phase.RUNNING, now)  # the outcome is taken in
        pool.look(Phase.RUNNING, now + 1)
        better = pool._next
        assert better is not None
        while better.importing:
            better.events(HUNG)
        second = pool.take("python")
        assert second is better
        assert loaded(second, tmp_path, "tqdm", "idna") == ["idna"]
    finally:
        pool.close()


def test_a_script_that_edits_the_search_path_is_preloaded_once_it_was_seen(
    packages: Path, tmp_path: Path
) -> None:
    """A directory that it adds may hide an installed package: only a worker can tell."""
    write(packages, tqdm="MINE = 0\n", idna="")
    (tmp_path / "fork").mkdir()
    text = "import sys\nfound = ('tqdm' in sys.modules) + 2 * ('idna' in sys.modules)\n"
    text += "sys.path.insert(0, 'fork')\nimport tqdm, idna\nsys.exit(40 + found + 4 * tqdm.MINE)\n"
    main = script(tmp_path, text)
    env = environment(packages)
    assert [run(main, env=env, cwd=tmp_path).code for _ in range(2)] == [40, 43]
    other = script(tmp_path, text + "\n", "other.py")
    (tmp_path / "fork" / "tqdm.py").write_text("MINE = 1\n")
    assert [run(other, env=env, cwd=tmp_path).code for _ in range(2)] == [44, 46]


READS = "import os\nfound = os.environ.get('NEW_X')\n"


@pytest.mark.parametrize(
    ("text", "early", "refused"),
    [
        ("import tqdm\nos.environ['NEW_X'] = f()\nimport idna\n", ["tqdm", "idna"], None),
        ("os.environ['NEW_X'] = f()\nimport tqdm, idna\n", [], "reads NEW_X"),
        ("import idna\nos.environ[f()] = '1'\nimport six\n", ["idna", "six"], None),
        ("os.environ[f()] = '1'\nimport markupsafe\n", [], "reads NEW_X"),
        ("print()\nos.environ['NEW_X'] = f()\nimport tqdm\n", [], "reads NEW_X"),
        ("print()\nos.environ[f()] = '1'\nimport markupsafe\n", [], "reads NEW_X"),
        ("print()\nos.environ['NEW_X'] = '1'\nimport tqdm\n", [], "reads NEW_X"),
        ("os.environ['NEW_X'] = '1'\nprint()\nimport tqdm\n", ["tqdm"], None),
        ("os.environ['NEW_X'] = '1'\nprint()\nos.environ['NEW_X'] = '2'\nimport tqdm\n", [], "reads NEW_X"),
        ("print()\nos.environ['TQDM_X'] = '1'\nimport tqdm, idna\n", ["idna"], None),
    ],
)
def test_a_variable_counts_from_the_line_on_that_may_set_it(
    text: str, early: list[str], refused: str | None, preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """At the first start and at a restart; here a newer version reads more than the list knows of."""
    write(packages, tqdm=READS, markupsafe=READS, idna="", six="")
    names = ("tqdm", "idna", "six", "markupsafe")
    learned = ImportCache(["script", script(tmp_path, text)], os.environ)
    learned.add([name for name in names if name in text])  # as a worker does
    spawner = preloaded(*learned.all_lines())
    assert loaded(spawner, tmp_path, *names) == early
    if refused is not None:
        assert spawner.log.refused()[1] == f"{refused}, which your code may set, while it is imported"


@pytest.mark.parametrize(
    ("text", "early"),
    [
        ("import tqdm\nos.environ['NEW_X'] = str(1)\nimport idna\n", ["tqdm", "idna"]),
        ("os.environ['NEW_X'] = str(1)\nimport tqdm, idna\n", []),
        ("import idna\nos.environ[str(1)] = '1'\nimport markupsafe\n", []),
    ],
)
def test_it_does_so_at_the_first_start(
    text: str, early: list[str], preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    write(packages, tqdm=READS, markupsafe=READS, idna="")
    learned = ImportCache(["script", script(tmp_path, text)], os.environ)
    assert loaded(preloaded(*learned.first_lines()), tmp_path, "tqdm", "idna", "markupsafe") == early


def test_variables_of_what_the_user_names_are_not_looked_at(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    write(packages, idna=READS)
    (packages / "tqdm").mkdir()
    (packages / "tqdm" / "__init__.py").write_text(READS)
    (packages / "tqdm" / "part.py").write_text(READS)
    spawner = preloaded("*tqdm", "~NEW_X", "tqdm:part", "tqdm.part")
    assert loaded(spawner, tmp_path, "tqdm", "tqdm.part") == ["tqdm", "tqdm.part"]
    assert "reads NEW_X" in preloaded("*tqdm", "~NEW_X", "idna").log.refused()[1]
    write(packages, idna="import os\nfound = os.environ.get('RANK')\n")
    assert preloaded("*idna").log.refused()[1] == "reads RANK while it is imported"


def test_an_import_does_not_see_the_variables_of_what_the_script_imports_later(
    preloaded: Any, packages: Path, tmp_path: Path
) -> None:
    """What the user names is imported first."""
    write(packages, tqdm="import os\nos.environ['NEW_X'] = '1'\n", idna=f"{READS}assert not found\n")
    assert loaded(preloaded("*tqdm", "idna"), tmp_path, "tqdm", "idna") == ["tqdm", "idna"]


def test_memory_that_all_forks_would_share_is_left_to_the_workers(preloaded: Any, packages: Path) -> None:
    """What rank 0 writes there, rank 1 would read."""
    write(packages, tqdm="import mmap\nkept = mmap.mmap(-1, 4096)\n")
    write(
        packages,
        idna="import mmap\nown = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)\nmmap.mmap(-1, 4096).close()\n",
    )
    spawner = preloaded("idna", "tqdm")
    assert spawner.log.refused() == ("tqdm", "maps /dev/zero (deleted) for all forks")


@pytest.mark.parametrize("text", [THREAD, "import os\nrank = os.environ.get('RANK')\n", "import unproven\n"])
def test_what_the_guards_find_counts_for_every_script(text: str, packages: Path, tmp_path: Path) -> None:
    """And what only holds for one does not: it reads a variable which that one may set."""
    write(packages, tqdm=text, idna=READS, unproven="")
    text = "import os, sys\nfound = 'idna' in sys.modules\n{}\nimport idna, tqdm\nsys.exit(40 + found)\n"
    env = environment(packages)
    setting = script(tmp_path, text.format("os.environ['NEW_X'] = str(found)"))
    other = script(tmp_path, text.format(""), "other.py")
    said = [run(main, env=env) for main in (setting, setting, setting, other, other)]
    assert [one.code for one in said] == [40, 40, 40, 41, 41]
    assert [sum("is not preloaded" in line for line in one.said) for one in said] == [1, 1, 0, 0, 0]
