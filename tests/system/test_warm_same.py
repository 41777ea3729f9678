"""A script cannot tell its second launch from its first, nor either of them from a start without a preload.

Every package here is made for the test, installed in a site-packages of its own, and does one odd thing while
it is imported. The script prints what it observes; the output has to be the same with `--warm off`, at the
first launch, at later ones, and after a restart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HUNG
from tests.support.vet import vet

pytestmark = pytest.mark.untraced  # coverage has hooks of its own in every process


class Site:
    """A script and the packages it imports, in directories of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "site-packages"
        self.packages.mkdir(parents=True)
        self.script = folder / "script.py"
        self.env = {
            **os.environ,
            "PYTHONPATH": str(self.packages),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "EARLY": str(folder / "early"),
        }
        self.package("plain", "")

    def package(self, name: str, text: str) -> None:
        (self.packages / f"{name}.py").write_text(text)

    def run(self, *words: str, args: tuple[str, ...] = (), ranks: int = 1) -> list[Any]:
        """What every rank printed as one line of JSON, in any order; rank by rank if it prints its rank."""
        done = self.finished(*words, args=args, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def finished(
        self, *words: str, args: tuple[str, ...] = (), ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(ranks)]
        command += ["--log-line-prefix-template", "", *words, str(self.script), *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=2 * HUNG)

    def vet(self) -> None:
        """What the helpers in the background do while a job runs: find out what can be preloaded."""
        vet(self.script, self.env)

    def same_at_every_launch(self, *args: str) -> list[Any]:
        """The common output of a cold start and three launches."""
        cold = self.run("--warm", "off", args=args)
        launches = [self.run(args=args)]
        self.vet()
        launches += [self.run(args=args) for _ in range(2)]
        assert launches == [cold] * 3
        self.assert_preloaded("plain")
        return cold

    def assert_preloaded(self, *names: str) -> None:
        """At the last launch: else the test would show nothing."""
        assert set(names) <= set(json.loads((self.folder / "early").read_text()))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def shows(expression: str, before: str = "") -> str:
    """A script that imports the packages `plain` and `odd`, and prints a value.

    All imports are at its top, so that a launch waits for their preload.
    """
    return f"""import os, sys
early = [name for name in ("odd", "plain") if name in sys.modules]
{before}import json
import odd
import plain
with open(os.environ["EARLY"], "w") as file:
    json.dump(early, file)
print(json.dumps({expression}))
"""


def test_the_signal_handler_of_a_package_is_there_at_every_launch(site: Site) -> None:
    """SIGTERM → save a checkpoint."""
    site.package("odd", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('saved'))\n")
    site.script.write_text(shows("callable(signal.getsignal(signal.SIGTERM))", "import signal\n"))
    assert site.same_at_every_launch() == [True]


def test_a_variable_that_only_some_arguments_set_is_seen_by_the_package(site: Site) -> None:
    site.package("odd", "import os\nOFFLINE = os.environ.get('ODD_OFFLINE')\n")
    condition = "if '--offline' in sys.argv: os.environ['ODD_OFFLINE'] = '1'\n"
    site.script.write_text(shows("odd.OFFLINE", condition))
    assert site.run() == [None]
    site.vet()
    for _ in range(2):
        assert site.run() == [None]
    for _ in range(2):
        assert site.run(args=("--offline",)) == ["1"]
    assert site.run() == [None]
    site.assert_preloaded("plain")


@pytest.mark.parametrize("noise", ["", "print('{}', flush=True)\n"], ids=["quiet", "after output"])
def test_a_variable_with_a_computed_name_is_seen_or_the_loss_is_told(noise: str, site: Site) -> None:
    """Executed again without the preload, unless the script has done something before."""
    site.package("odd", "import os\nOFFLINE = os.environ.get('ODD_OFFLINE')\n")
    condition = "name = '_'.join(['ODD', 'OFFLINE'])\nif '--offline' in sys.argv: os.environ[name] = '1'\n"
    site.script.write_text(shows("[odd.OFFLINE, len(sys.argv)]", condition))
    site.run()
    site.vet()
    site.run()
    site.assert_preloaded("odd")
    if noise:  # on the line before, so that the block of leading imports stays what it is
        site.script.write_text(
            site.script.read_text().replace("if '--off", f"if len(sys.argv) > 1: {noise}if '--off")
        )
        site.run()
        site.vet()
    done = site.finished("--warm", "auto", args=("--offline",))
    last = json.loads(done.stdout.splitlines()[-1])
    if noise and "odd" in json.loads((site.folder / "early").read_text()):
        assert "ODD_OFFLINE was set after odd had been preloaded" in done.stderr
    else:
        assert last == ["1", 2], done.stderr
    assert site.run(args=("--offline",))[-1] == ["1", 2]


RANDOM = """
import random, tempfile, uuid
try:
    import numpy
except ImportError:
    numpy = None
own = random.Random()
nested = {"rng": [random.Random()]}
seeded = random.Random(7)
drawn = numpy.random.default_rng() if numpy else own
legacy = numpy.random.RandomState() if numpy else own
"""


def test_generators_made_at_import_differ_between_ranks_and_launches(site: Site) -> None:
    site.package("odd", RANDOM)
    values = (
        "[odd.own.random(), odd.nested['rng'][0].random(), odd.drawn.random(), odd.legacy.random_sample()"
    )
    values += " if odd.numpy else odd.drawn.random()]"
    site.script.write_text(shows(f"[{values}, odd.seeded.random()]"))
    drawn = site.run(ranks=2)
    site.vet()
    drawn += [one for _ in range(2) for one in site.run(ranks=2)]
    site.assert_preloaded("odd")
    for column in zip(*(values for values, _ in drawn), strict=True):
        assert len(set(column)) == len(drawn), column
    assert len({seeded for _, seeded in drawn}) == 1


@pytest.mark.parametrize(
    "made",
    [
        "import uuid\nvalue = str(uuid.uuid4())\n",
        "import uuid\nvalue = [uuid.uuid4().hex]\n",
        "import os\nclass Run:\n    key = os.urandom(8).hex()\nvalue = Run.key\n",
        "import tempfile\nvalue = tempfile.mkdtemp()\n",
        "import os\nvalue = os.environ['RUN_KEY'] = os.urandom(8).hex()\nvalue = [value]\n",
        "import tempfile\nfolder = tempfile.TemporaryDirectory()\nvalue = folder.name\n",
    ],
    ids=["uuid", "in a list", "in a class", "mkdtemp", "in a variable", "TemporaryDirectory"],
)
def test_random_values_made_at_import_differ_between_ranks_and_launches(made: str, site: Site) -> None:
    site.package("odd", made)
    site.script.write_text(shows("odd.value"))
    drawn = site.run(ranks=2)
    site.vet()
    drawn += [one for _ in range(2) for one in site.run(ranks=2)]
    values = list(map(json.dumps, drawn))
    assert len(set(values)) == 6, values
    site.assert_preloaded("plain")


def test_a_package_that_edits_the_search_path(site: Site) -> None:
    for where in ("sys.path.insert(0, '/extra')", "sys.path.append('/extra')"):
        site.package("odd", f"import sys\n{where}\n")
        site.script.write_text(shows("sys.path"))
        assert "/extra" in site.same_at_every_launch()[0]


def test_a_package_that_edits_the_search_path_for_one_import_is_preloaded(site: Site) -> None:
    text = (
        "import sys\nkept = list(sys.path)\nsys.path.insert(0, '/extra')\nimport plain\nsys.path[:] = kept\n"
    )
    site.package("odd", text)
    site.script.write_text(shows("sys.path"))
    site.same_at_every_launch()
    site.assert_preloaded("odd", "plain")


def test_a_package_that_keeps_a_stream_keeps_the_workers_own(site: Site) -> None:
    site.package("odd", "import logging\nfrom sys import stdout\nhandler = logging.StreamHandler()\n")
    site.script.write_text(
        shows(
            "[odd.stdout is sys.stdout, odd.handler.stream is sys.stderr, sys.stdout.mode, sys.stdout.name]"
        )
    )
    assert site.same_at_every_launch() == [[True, True, "w", "<stdout>"]]
    site.assert_preloaded("odd")


@pytest.mark.parametrize(
    "read",
    [
        "import sys\nvalue = sys.argv[1:]\n",
        "import sys\nvalue = [word for word in sys.argv if word == '--fast']\n",
        "from sys import argv\nvalue = argv\n",
        "import argparse\nparser = argparse.ArgumentParser()\nvalue = parser.prog\n",
        "import __main__\nvalue = __main__.__file__\n",
        "import sys\nvalue = getattr(sys.modules['__main__'], '__file__', None)\n",
        "import sys\nvalue = sys.orig_argv[-1]\n",
    ],
)
def test_a_package_that_reads_the_arguments_or_the_script(read: str, site: Site) -> None:
    site.package("odd", read)
    site.script.write_text(shows("odd.value"))
    site.same_at_every_launch("--fast")


# What a package may do while it is imported, and what a script sees of it.
ODD_THINGS = {
    "sys.excepthook = lambda *_: None": "sys.excepthook.__module__",
    "sys.unraisablehook = print": "sys.unraisablehook is print",
    "threading.excepthook = print": "threading.excepthook is print",
    "sys.setrecursionlimit(1234)": "sys.getrecursionlimit()",
    "sys.setswitchinterval(0.02)": "sys.getswitchinterval()",
    "builtins.odd = 1": "hasattr(builtins, 'odd')",
    "logging.basicConfig(level=7)": "[logging.root.level, len(logging.root.handlers)]",
    "logging.getLogger('odd').addHandler(logging.NullHandler())": "len(logging.getLogger('odd').handlers)",
    "warnings.filterwarnings('ignore', 'odd warning')": "sum('odd' in str(one) for one in warnings.filters)",
    "multiprocessing.set_start_method('spawn')": "multiprocessing.get_start_method(allow_none=True)",
    "os.umask(0o27)": "[os.umask(0o22), os.umask(0o22)][0]",
    "os.chdir('/')": "os.getcwd()",
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))": "resource.getrlimit(resource.RLIMIT_CORE)",
    "os.nice(1)": "os.getpriority(0, 0)",
    "signal.setitimer(signal.ITIMER_PROF, 1000)": "signal.getitimer(signal.ITIMER_PROF)[0] > 0",
    "signal.set_wakeup_fd(os.open('/dev/null', os.O_WRONLY | os.O_NONBLOCK))": "signal.set_wakeup_fd(-1) > 0",
    "gc.set_threshold(701)": "gc.get_threshold()",
    "gc.callbacks.append(lambda *_: None)": "len(gc.callbacks)",
    "atexit.register(int)": "atexit._ncallbacks() > 0",
    "sys.meta_path.append(type('Odd', (), {'find_spec': lambda *_: None}))": "sys.meta_path[-1].__name__",
    "decimal.getcontext().prec = 5": "decimal.getcontext().prec",
    "socket.setdefaulttimeout(99)": "socket.getdefaulttimeout()",
    "random.seed(5)": "random.random()",
    "contextvars.ContextVar('odd').set(1)": "sorted(one.name for one in contextvars.copy_context())",
    "threading.current_thread().odd = 1": "hasattr(threading.current_thread(), 'odd')",
    "os.environ['SET_BY_ODD'] = '1'": "os.environ.get('SET_BY_ODD')",
}


def test_what_a_package_does_to_the_process_is_seen_at_every_launch(site: Site) -> None:
    modules = "atexit, builtins, contextvars, decimal, gc, logging, multiprocessing, os, random, resource"
    modules += ", signal, socket, sys, threading, warnings"
    for number, text in enumerate(ODD_THINGS):
        site.package(f"odd{number}", f"import {modules}\n{text}\n")
    site.package("odd", "")
    odd = ", ".join(f"odd{number}" for number in range(len(ODD_THINGS)))
    values = ", ".join(f"{text!r}: {value}" for text, value in ODD_THINGS.items())
    site.script.write_text(shows(f"{{{values}}}", f"import {modules}\nimport {odd}\n"))
    (seen,) = site.same_at_every_launch()
    expected = {"os.umask(0o27)": 0o27, "os.chdir('/')": "/", "sys.setrecursionlimit(1234)": 1234}
    assert {text: seen[text] for text in expected} == expected


def test_times_and_numbers_that_a_package_keeps_are_the_workers_own(site: Site) -> None:
    site.package(
        "odd",
        "import os, time, uuid\nSTARTED = time.time()\nclass Run:\n    pid = os.getpid()\n"
        "    began = time.monotonic()\nRUN_ID = uuid.uuid4().hex\nsame = RUN_ID\nFIXED = 1.5\n",
    )
    site.script.write_text(
        shows("[odd.STARTED, odd.Run.began, odd.Run.pid - os.getpid(), odd.RUN_ID, odd.same, odd.FIXED]")
    )
    site.run()
    site.vet()
    found = []
    for _ in range(2):
        began = time.time(), time.monotonic()
        found += site.run(ranks=2)
        site.assert_preloaded("odd")
        for started, steady, pid, run_id, same, fixed in found[-2:]:
            assert started > began[0]
            assert steady > began[1]
            assert (pid, same, fixed) == (0, run_id, 1.5)
    assert len({run_id for _, _, _, run_id, _, _ in found}) == 4


UPGRADED = """
import os, sys
import odd
print(odd.VERSION, flush=True)
if sys.argv[1:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open(odd.__file__ + ".new", "w") as file:
        file.write("VERSION = 22\\n")  # and another size: bytecode may be from the same second
    os.replace(odd.__file__ + ".new", odd.__file__)
    os.mkdir(os.path.join(os.path.dirname(odd.__file__), "odd-22.dist-info"))
    sys.exit(1)
"""


def test_a_package_that_is_upgraded_while_the_job_runs_is_new_after_a_restart(site: Site) -> None:
    site.package("odd", "VERSION = 1\n")
    site.script.write_text(UPGRADED)
    site.finished()
    site.vet()
    done = site.finished("--max-restarts", "1", "-q", args=("upgrade",))
    assert done.stdout.split() == ["1", "22"], done.stderr


def test_no_warning_of_the_start_itself_is_shown(site: Site) -> None:
    """A worker with a link for re-entry, which a restart may use."""
    site.env["PYTHONWARNINGS"] = "always"
    site.script.write_text(shows("sorted(sys.warnoptions)"))
    site.package("odd", "")
    for _ in range(2):
        done = site.finished("--max-restarts", "1")
        assert (done.returncode, json.loads(done.stdout)) == (0, ["always"]), done
        assert "Warning" not in done.stderr, done.stderr
        site.vet()


NEEDS_THE_GIL = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "needy", NULL, 0, NULL};
PyMODINIT_FUNC PyInit_needy(void) { return PyModuleDef_Init(&module); }
"""


def test_the_gil_is_on_from_the_import_of_the_module_that_needs_it(site: Site) -> None:
    """And not from the first line on, as in a fork of a process that has imported the module."""
    (site.folder / "needy.c").write_text(NEEDS_THE_GIL)
    built = site.packages / f"needy{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", include, "-o", str(built), str(site.folder / "needy.c")], check=True
    )
    site.package("odd", "import sys\nbefore = sys._is_gil_enabled()\nimport needy\n")
    site.script.write_text(shows("[odd.before, sys._is_gil_enabled()]"))
    assert site.same_at_every_launch() == [[False, True]]
    assert json.loads((site.folder / "early").read_text()) == ["plain"]


if not sysconfig.get_config_var("Py_GIL_DISABLED"):  # then it is on from the first line, and stays so
    del test_the_gil_is_on_from_the_import_of_the_module_that_needs_it
