"""A script cannot tell its second launch from its first, nor either of them from a start without a preload.

Every package here is made for the test, installed in a site-packages of its own under a name of the list, as
a newer version would be, and does one odd thing while it is imported. The script prints what it observes; the
output has to be the same with `--warm off`, at the first launch, at later ones, and after a restart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from phalanx.helpers.preload.packages import PACKAGES
from tests.conftest import HUNG

pytestmark = pytest.mark.untraced  # coverage has hooks of its own in every process


LISTED = {"odd": "tqdm", "plain": "idna"}


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
        (self.packages / f"{LISTED.get(name, name)}.py").write_text(text)

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

    def same_at_every_launch(self, *args: str) -> list[Any]:
        """The common output of a cold start and three launches."""
        cold = self.run("--warm", "off", args=args)
        launches = [self.run(args=args) for _ in range(3)]
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
early = [name for name, module in {tuple(LISTED.items())} if module in sys.modules]
{before}import json
import tqdm as odd
import idna as plain
with open(os.environ["EARLY"], "w") as file:
    json.dump(early, file)
print(json.dumps({expression}))
"""


def test_the_signal_handler_of_a_package_is_there_at_every_launch(site: Site) -> None:
    """SIGTERM → save a checkpoint."""
    site.package("odd", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('saved'))\n")
    site.script.write_text(shows("callable(signal.getsignal(signal.SIGTERM))", "import signal\n"))
    assert site.same_at_every_launch() == [True]


@pytest.mark.parametrize("name", ["'TQDM_OFFLINE'", "'_'.join(['TQDM', 'OFFLINE'])"])
def test_a_variable_that_only_some_arguments_set_is_seen_by_the_package(name: str, site: Site) -> None:
    site.package("odd", "import os\nOFFLINE = os.environ.get('TQDM_OFFLINE')\n")
    condition = "if '--offline' in sys.argv: os.environ[NAME] = '1'\n".replace("NAME", name)
    site.script.write_text(shows("odd.OFFLINE", condition))
    for _ in range(3):
        assert site.run() == [None]
    for _ in range(2):
        assert site.run(args=("--offline",)) == ["1"]
    assert site.run() == [None]
    site.assert_preloaded("plain")


@pytest.mark.parametrize(
    ("before", "package"),
    [
        ("warnings.filterwarnings('ignore')\n", "warnings.warn('careful')\n"),
        ("logging.getLogger('odd').setLevel(50)\n", "logging.getLogger('odd').error('no')\n"),
        ("sys.stderr = None\n", "if sys.stderr: sys.stderr.write('text')\n"),
        ("", "warnings.warn('old', DeprecationWarning, stacklevel=2)\n"),
        ("", "warnings.warn('careful')\n"),
    ],
    ids=["ignored warning", "ignored message", "no stream", "warning to the importer", "text"],
)  # fmt: skip
def test_the_script_decides_what_is_shown_of_an_import(before: str, package: str, site: Site) -> None:
    modules = "import logging, sys, warnings\n"
    site.package("odd", modules + package)
    site.script.write_text(shows("odd.__name__", modules + before))
    shown = [site.finished(*words).stderr for words in (("-q", "--warm", "off"), ("-q",), ("-q",))]
    note = "is not preloaded"
    shown = ["".join(line for line in text.splitlines(True) if note not in line) for text in shown]
    assert shown == [shown[0]] * 3
    site.assert_preloaded("plain")


@pytest.mark.parametrize(
    ("files", "package"),
    [
        (["extra.py"], "try:\n    import extra\n    found = 1\nexcept ImportError:\n    found = 0\n"),
        (["extra.py"], "import importlib.util as u\nfound = u.find_spec('extra') is not None\n"),
        (["extra/part.py"], "found = 1\ntry:\n    import extra.part\nexcept ImportError:\n    found = 0\n"),
        (["extra/__init__.py"], "import importlib.util as u\nfound = u.find_spec('extra') is not None\n"),
        (["idna/part.py"], "import idna\nfound = idna.__file__.endswith('site-packages/idna.py')\n"),
    ],
    ids=["module", "looked for", "directory", "package", "directory that hides nothing"],
)  # fmt: skip
def test_a_package_that_looks_for_what_is_there_beside_the_script(
    files: list[str], package: str, site: Site
) -> None:
    for name in files:
        (site.folder / name).parent.mkdir(exist_ok=True)
        (site.folder / name).write_text("")
    site.package("odd", package)
    site.script.write_text(shows("odd.found"))
    assert site.same_at_every_launch() in ([1], [True])


def test_the_search_path_of_an_import_is_not_that_of_the_launcher(site: Site) -> None:
    site.package("odd", "import sys\nfound = len(sys.path) - len(set(sys.path))\n")
    site.script.write_text(shows("odd.found"))
    assert site.same_at_every_launch() == [0]


def test_a_package_that_reads_the_arguments_of_the_script(site: Site) -> None:
    site.package("odd", "import sys\nfound = len(sys.argv)\n")
    site.script.write_text(shows("odd.found"))
    assert site.same_at_every_launch("a", "b") == [3]


def test_a_package_that_edits_the_search_path(site: Site) -> None:
    for where in ("sys.path.insert(0, '/extra')", "sys.path.append('/extra')"):
        site.package("odd", f"import sys\n{where}\n")
        site.script.write_text(shows("sys.path"))
        assert "/extra" in site.same_at_every_launch()[0]


def test_a_package_that_edits_the_search_path_for_one_import_is_preloaded(site: Site) -> None:
    text = (
        "import sys\nkept = list(sys.path)\nsys.path.insert(0, '/extra')\nimport idna\nsys.path[:] = kept\n"
    )
    site.package("odd", text)
    site.script.write_text(shows("sys.path"))
    site.same_at_every_launch()
    site.assert_preloaded("odd", "plain")


SET, GET = "os.environ['SET_X'] = '1'", "found = os.environ.get('SET_X')"


@pytest.mark.parametrize(
    ("odd", "plain", "shown", "early"),
    [
        (SET, GET, "plain.found", ["odd", "plain"]),
        (f"{SET}; del os.environ['SET_X']", GET, "[plain.found, 'SET_X' in os.environ]", ["odd", "plain"]),
        (f"{SET}; raise ImportError", GET, "plain.found", ["plain"]),
        ("", "found = dict(os.environ).get('LOCAL_RANK')", "plain.found", ["odd"]),
        ("", "found = {**os.environ}.get('RANK')", "plain.found", ["odd"]),
        ("", "found = sum(name == 'RANK' for name in os.environ)", "plain.found", ["odd"]),
        ("", "found = '0' in os.environ.values()", "plain.found", ["odd"]),
        # It is known for which ones tqdm looks.
        ("found = dict(os.environ).get('LOCAL_RANK')", "", "odd.found", ["plain"]),
        ("found = [n for n, _ in os.environ.items() if n[:4] == 'TQDM']", "", "odd.found", ["odd", "plain"]),
        (
            "import ctypes.util",
            "from tqdm import ctypes; ctypes.util.find_library('c')",
            "1",
            ["odd", "plain"],
        ),
        ("os.environ['LATE'] = 'odd'", "", "os.environ['LATE']", ["plain"]),
        ("os.environ['EARLY'] = 'odd'", "", "os.environ['EARLY']", ["plain"]),
    ],
)
def test_what_an_import_finds_and_sets_in_the_environment(
    odd: str, plain: str, shown: str, early: list[str], site: Site
) -> None:
    site.package("odd", f"import os\n{odd}\n")
    site.package("plain", f"import os\n{plain}\n")
    before = "os.environ['EARLY'] = 'script'\nos.environ['LATE'] = ' '.join(['script'])\n"
    text = shows(shown, before).replace('os.environ["EARLY"]', repr(str(site.folder / "early")))
    if "raise" in odd:
        text = text.replace("import tqdm as odd\n", "try: import tqdm as odd\nexcept ImportError: pass\n")
    site.script.write_text(text)
    cold = site.run("--warm", "off")
    assert [site.run() for _ in range(3)] == [cold] * 3
    assert json.loads((site.folder / "early").read_text()) == early


def test_a_package_that_keeps_a_stream_keeps_the_workers_own(site: Site) -> None:
    site.package("odd", "import logging\nfrom sys import stdout\nhandler = logging.StreamHandler()\n")
    site.script.write_text(
        shows(
            "[odd.stdout is sys.stdout, odd.handler.stream is sys.stderr, sys.stdout.mode, sys.stdout.name]"
        )
    )
    assert site.same_at_every_launch() == [[True, True, "w", "<stdout>"]]
    site.assert_preloaded("odd")


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
    """At each of them until all that do not suit a fork are known."""
    modules = "atexit, builtins, contextvars, decimal, gc, logging, multiprocessing, os, random, resource"
    modules += ", signal, socket, sys, threading, warnings"
    names = [name for name in PACKAGES if "." not in name and name not in LISTED.values()]
    for name, text in zip(names, ODD_THINGS, strict=False):
        site.package(name, f"import {modules}\n{text}\n")
    site.package("odd", "")
    odd = ", ".join(names[: len(ODD_THINGS)])
    values = ", ".join(f"{text!r}: {value}" for text, value in ODD_THINGS.items())
    site.script.write_text(shows(f"{{{values}}}", f"import {modules}\nimport {odd}\n"))
    (seen,) = cold = site.run("--warm", "off")
    for launch in range(len(ODD_THINGS) + 1):
        assert site.run() == cold, launch
        if "plain" in json.loads((site.folder / "early").read_text()):
            break
    site.assert_preloaded("plain")
    expected = {"os.umask(0o27)": 0o27, "os.chdir('/')": "/", "sys.setrecursionlimit(1234)": 1234}
    assert {text: seen[text] for text in expected} == expected


UPGRADED = """
import os, sys
import tqdm as odd
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
