"""A Python program that is started as a worker sees and does what it would under `python script.py`.

Every program here runs twice, by the interpreter alone and through our bootstrap, and must give the same
bytes and the same end. What differs is meant to, and is pinned down in the section on differences:

* stdout is line-buffered, whatever it is connected to;
* faulthandler is on, and its file is one more descriptor (close-on-exec);
* there is one more frame at the bottom of the stack, so a recursion error comes one call earlier;
* under -S the module `os` has been imported already, and in a worker that is a fork of a Python that was up
  before, some more of the standard library;
* the wording for source that cannot be decoded.
"""

# ruff: noqa: E501 - one program, one line

from __future__ import annotations

import codecs
import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs, Std
from phalanx.agent.workers.worker_group import GroupOptions
from phalanx.agent.workers.worker_kinds import SubprocessContext
from phalanx.job.program import BOOTSTRAP, worker_argv
from phalanx.worker.bootstrap import ERROR_FILE
from tests.conftest import HUNG

pytestmark = pytest.mark.untraced
PYTHON = sys.executable


@dataclass(frozen=True)
class Ran:
    """How a program ended and what it said."""

    code: int
    out: bytes
    err: bytes


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the error file goes elsewhere."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONWARNINGS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return place


def ran(code: int, out: bytes, err: bytes) -> Ran:
    """Without what differs from one process to the next: addresses and thread numbers."""
    changing = re.compile(rb"0x[0-9a-f]{6,}|(?<=started )\d+")
    return Ran(code, changing.sub(b"#", out), changing.sub(b"#", err))


def run(argv: Sequence[str], stdin: bytes = b"", **kwargs: Any) -> Ran:
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=HUNG, **kwargs)
    return ran(done.returncode, done.stdout, done.stderr)


def bootstrapped(args: Sequence[str]) -> list[str]:
    argv = worker_argv(PYTHON, PYTHON, args, "")
    assert BOOTSTRAP in argv, f"{args} would be left alone"
    return argv


def same(*args: str, stdin: bytes = b"", **kwargs: Any) -> Ran:
    """Run both ways, demand equality, return what both did."""
    plain = run([PYTHON, *args], stdin, **kwargs)
    ours = run(bootstrapped(args), stdin, **kwargs)
    assert ours == plain
    return plain


def program(source: str | bytes, name: str = "prog.py") -> str:
    if isinstance(source, str):
        source = textwrap.dedent(source).encode()
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source)
    return name


# -- what the program finds -------------------------------------------------------------------------

# Looks before it imports anything; os comes last and is in neither list of modules for that.
PROBE = '''\
"""The docstring."""
import sys
MODULES = sorted(sys.modules)
CACHE = sorted(sys.path_importer_cache)
NAMES = list(globals())
import __main__, json, os, signal
def text(value):
    return type(value).__name__ if value is globals().get("__loader__") else repr(value).partition(" at 0x")[0]
def stream(s):
    return [s.name, s.mode, s.encoding, s.errors, s.newlines, s.write_through, s.fileno(), s.buffer.name,
            s.buffer.mode, type(s.buffer).__name__, s.isatty(), s.closed]
print(json.dumps({
    "modules": MODULES, "cache": CACHE, "names": NAMES,
    "main": {n: text(globals()[n]) for n in NAMES if n not in ("MODULES", "CACHE")},
    "loader": [getattr(__loader__, n, None) for n in ("name", "path")],
    "is main": __main__.__dict__ is globals(),
    "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": repr(sys.flags),
    "xoptions": sys._xoptions, "warnoptions": sys.warnoptions, "executable": sys.executable,
    "prefix": [sys.prefix, sys.base_prefix, sys.exec_prefix], "implementation": sys.implementation.cache_tag,
    "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
    "path_hooks": len(sys.path_hooks), "dont_write_bytecode": sys.dont_write_bytecode,
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "mask": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "default hook": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "stdout": stream(sys.stdout), "stderr": stream(sys.stderr), "stdin": stream(sys.stdin),
    "same streams": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "recursion": sys.getrecursionlimit(), "trace": [sys.gettrace(), sys.getprofile()],
    "environment": dict(os.environ), "cwd": os.getcwd(), "last": hasattr(sys, "last_value"),
}, indent=1, sort_keys=True))
'''


def found(*args: str, **kwargs: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(same(*args, **kwargs).out)
    return data


def test_a_script() -> None:
    data = found(program(PROBE), "a", "--flag", "", "ünï", "-")
    assert data["argv"] == ["prog.py", "a", "--flag", "", "ünï", "-"]
    assert data["main"]["__file__"] == repr(os.path.abspath("prog.py"))
    assert not [name for name in data["modules"] if "phalanx" in name]


@pytest.mark.parametrize(
    "path", ["./prog.py", "sub/prog.py", "sub/../prog.py", "{cwd}/prog.py", "sub//prog.py"]
)
def test_ways_to_name_a_script(path: str) -> None:
    program(PROBE)
    program(PROBE, "sub/prog.py")
    found(path.format(cwd=os.getcwd()))


@pytest.mark.parametrize("target", ["real/prog.py", "{cwd}/real/prog.py", "hop.py"])
def test_a_symlinked_script(target: str) -> None:
    program(PROBE, "real/prog.py")
    os.symlink("real/prog.py", "hop.py")
    os.symlink(target.format(cwd=os.getcwd()), "link.py")
    assert found("link.py")["path"][0] == os.path.abspath("real")
    os.symlink("real", "linked")
    assert found("linked/prog.py")["path"][0] == os.path.abspath("real")


@pytest.mark.parametrize(
    "flags",
    [
        "-u", "-O", "-OO", "-I", "-P", "-E", "-s", "-B", "-b", "-bb", "-d", "-q", "-R", "-uBO", "-IOu",
        "-X dev", "-Xutf8", "-X utf8=0", "-W error", "-Wdefault", "-W ignore::UserWarning",
        "-X tracemalloc", "-X warn_default_encoding -W error", "-X frozen_modules=off", "-X int_max_str_digits=0",
        "-X showrefcount -X no_debug_ranges", "-X pycache_prefix=cache",
    ],
)  # fmt: skip
def test_interpreter_flags(flags: str) -> None:
    if flags == "-P" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    found(*flags.split(), program(PROBE), "-O")
    same(*flags.split(), "-m", "prog", "-O")  # not found where the directory is not in sys.path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONSAFEPATH", "1"),
        ("PYTHONPATH", "one:two"),
        ("PYTHONWARNINGS", "default"),
        ("PYTHONOPTIMIZE", "2"),
        ("PYTHONIOENCODING", "latin-1:replace"),
        ("PYTHONUTF8", "0"),
        ("PYTHONDEVMODE", "1"),
        ("PYTHONFAULTHANDLER", "1"),
    ],
)
def test_interpreter_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    found(program(PROBE))


def test_unbuffered_by_variable_means_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A documented difference: fragments of a line would mix with those of other workers."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    text = (
        "import sys\nprint(sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.write_through)\n"
    )
    assert run(bootstrapped([program(text)])).out == b"True False False\n"
    assert run(bootstrapped(["-u", program(text)])).out == b"True False False\n"
    monkeypatch.delenv("PYTHONUNBUFFERED")
    assert run(bootstrapped(["-u", program(text)])).out == b"False True True\n"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such workers are left alone by now")
def test_code_on_the_command_line() -> None:
    data = found("-c", PROBE, "x", "-m")
    assert data["argv"] == ["-c", "x", "-m"]
    assert data["path"][0] == ""
    assert same("-c", "import sys; sys.exit(4)").code == 4
    assert b"ZeroDivisionError" in same("-c", "def f():\n    1/0\nf()").err
    assert b"SyntaxError" in same("-c", "a b").err


def test_a_module() -> None:
    data = found("-m", program(PROBE).removesuffix(".py"), "x", "-c")
    assert data["argv"] == [os.path.abspath("prog.py"), "x", "-c"]
    assert data["path"][0] == os.getcwd()


def test_a_package() -> None:
    program("print('pkg', __name__)", "pkg/__init__.py")
    program(
        "from . import other\nfrom .other import NAME\nprint(__package__, NAME, __spec__.name)", "pkg/mod.py"
    )
    program("NAME = __name__", "pkg/other.py")
    program(PROBE, "pkg/__main__.py")
    assert same("-m", "pkg.mod").out == b"pkg pkg\npkg pkg.other pkg.mod\n"
    plain = same("-m", "pkg")
    assert json.loads(plain.out.partition(b"\n")[2])["main"]["__package__"] == "'pkg'"


@pytest.mark.parametrize(
    "name", ["absent", "pkg", "pkg.absent", "broken", "failing", "os", "sys", ".x", "prog.py"]
)
def test_a_module_that_cannot_be_run(name: str) -> None:
    program("", "pkg/__init__.py")
    program("", "prog.py")
    program("a b", "broken.py")
    program("import absent", "failing.py")
    same("-m", name)


@pytest.mark.parametrize("tool", ["cProfile", "trace --trace", "trace --count -C out", "pdb -c c"])
def test_tools_that_run_programs(tool: str) -> None:
    program("import sys\ndef f():\n    return sys.argv\nprint(f())\n")
    if tool == "cProfile":  # it prints times
        assert run(bootstrapped(["-m", *tool.split(), "prog.py", "x"])).code == 0
    else:
        same("-m", *tool.split(), "prog.py", "x", stdin=b"q\n")


def test_a_directory_and_a_zip_file() -> None:
    program(PROBE, "app/__main__.py")
    program("", "app/beside.py")
    for name in ("app.zip", "app", "app.pyz", "named.py"):
        if name != "app":
            with zipfile.ZipFile(name, "w") as archive:
                archive.write("app/__main__.py", "__main__.py")
        assert found(name, "x")["path"][0] == os.path.abspath(name)
        found("-I", name)
        if sys.version_info >= (3, 11):
            found("-P", name)
    program("raise ValueError('in a directory')", "app/__main__.py")
    assert b"in a directory" in same("app").err
    os.mkdir("empty")
    same("empty")


def test_bytecode() -> None:
    program(PROBE)
    py_compile.compile("prog.py", "prog.pyc")
    assert found("prog.pyc", "x")["main"]["__file__"] == repr(os.path.abspath("prog.pyc"))
    os.rename("prog.pyc", "hidden")
    found("hidden")


def test_a_script_without_a_suffix() -> None:
    found(program(PROBE, "train"))
    found(program("#!/usr/bin/env python\n" + PROBE, "odd.name.txt"))


def test_a_script_that_cannot_be_opened() -> None:
    argv = bootstrapped([program("")])
    os.unlink("prog.py")
    assert run(argv) == run([PYTHON, "prog.py"])
    assert run(argv).code == 2
    # One that was never there, too: the record of the error tells it from a usage error.
    argv = bootstrapped(["absent.py"])
    assert argv != [PYTHON, "absent.py"]
    assert run(argv) == run([PYTHON, "absent.py"])


def test_what_is_left_to_the_interpreter() -> None:
    program("print(1)")
    for args in (["-"], ["-V"], ["-i", "prog.py"], ["-x", "prog.py"], [], ["-m"], ["--help"],
                 ["/dev/stdin"], ["-mprog"], ["--", "prog.py"]):  # fmt: skip
        assert worker_argv(PYTHON, PYTHON, args, "") == [PYTHON, *args]
    assert worker_argv("/bin/sh", "/bin/sh", ["prog.py"], "") == ["/bin/sh", "prog.py"]


# -- how source is read -----------------------------------------------------------------------------

SOURCES: dict[str, bytes] = {
    "empty": b"",
    "bom": codecs.BOM_UTF8 + "print('ü')".encode(),
    "cookie": "# -*- coding: latin-1 -*-\nprint(ascii('ü'))\nraise ValueError('ü')".encode("latin-1"),
    "cookie second line": "#!/bin/python\n# coding: cp1252\nprint(ascii('€'))".encode("cp1252"),
    "crlf": b"if 1:\r\n    print('x')\r\n1/0\r\n",
    "cr": b"print('x')\rprint('y')\r",
    "no newline": b"x = 1\nif x:\n    print(x)",
    "form feed": b"\x0cprint(1)\n\x0c\nprint(2)\n",
    "future": b"from __future__ import annotations\ndef f(a: nothing): pass\nprint(f.__annotations__)",
    "no future": b"def f(a: nothing): pass\n",
    "annotations": b"x: int = 1\nprint(__annotations__, x)",
    "docstring": b"'''doc'''\nprint(__doc__)",
    "syntax error": b"print(1)\nfor x in\n    pass\n",
    "indentation": b"if 1:\nprint(1)\n",
    "tabs": b"if 1:\n        x = 1\n\ty = 1\n",
    "open bracket": b"print(1)\nx = (1,\n",
    "open string": b"x = '''abc\n",
    "late future": b"import os\nfrom __future__ import annotations\n",
    "return outside": b"return 1\n",
    "warning in syntax": b"x = 1\nprint(x is 1)\n",
    "escape": b"print('\\d')\n",
}


@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str) -> None:
    same(program(SOURCES[name]))
    same("-W", "error", "prog.py")


@pytest.mark.parametrize(
    "source",
    [b"print('\xff')\n", b"print(1)\n\0\n", b"# coding: klingon\n"],
    ids=["not utf-8", "nul", "no such encoding"],
)
def test_source_that_cannot_be_decoded_is_refused(source: bytes) -> None:
    if b"\0" in source and sys.version_info < (3, 11, 4):
        pytest.skip("Python before 3.11.4 reads a file up to the first NUL byte")
    # The wording is the interpreter's for files, or for text, and those differ.
    plain, ours = run([PYTHON, program(source)]), run(bootstrapped(["prog.py"]))
    assert (ours.code, ours.out) == (plain.code, plain.out) == (1, b"")
    assert b"Error: " in ours.err
    assert BOOTSTRAP.encode() not in ours.err


# -- how it ends --------------------------------------------------------------------------------------

ENDINGS: dict[str, str] = {
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('sorry, ü')",
    "exit none": "raise SystemExit",
    "exit true": "raise SystemExit(True)",
    "exit negative": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit object": "import sys; sys.exit({'a': 1})",
    "exit subclass": "class Stop(SystemExit): pass\nraise Stop(9)",
    "exit in function": "def f(): exit(5)\nf()",
    "_exit": "import os; print('lost', end=''); os._exit(6)",
    "exception": "def f(x):\n    return 1 / x\nprint('before')\nf(0)",
    "chain": "try:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e",
    "context": "try:\n    {}['k']\nexcept KeyError:\n    int('x')",
    "notes": "e = ValueError('noted')\ne.add_note('one')\nraise e",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "base": "class Mine(BaseException): pass\nraise Mine('base')",
    "stop iteration": "raise StopIteration(3)",
    "generator exit": "raise GeneratorExit",
    "no str": "class Bad(Exception):\n    def __str__(self): raise TypeError\nraise Bad",
    "multi-line": "raise ValueError('one\\ntwo')",
    "import error": "import nothing_of_that_name",
    "eval": "eval('1 +')",
    "exec": "exec(compile('1/0', 'other.py', 'exec'))",
    "assertion": "assert 1 == 2, 'no'",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt in function": "def f():\n    raise KeyboardInterrupt('now')\nf()",
    "real interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "interrupt with hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\nraise KeyboardInterrupt",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "sigpipe ignored": "import os, signal\nos.kill(os.getpid(), signal.SIGPIPE)\nprint('alive')",
    "kill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "abort": "import os; os.abort()",
    "atexit": "import atexit\natexit.register(print, 'bye')\n1/0",
    "atexit fails": "import atexit\natexit.register(lambda: 1/0)\nprint('end')",
    "atexit exits": "import atexit, sys\natexit.register(sys.exit, 4)\nprint('end')",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1/0, name='T')\nt.start(); t.join()",
    "thread outlives": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()",
    "thread outlives error": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()\n1/0",
    "unraisable": "class D:\n    def __del__(self): 1/0\nD()",
    "hook": "import sys\ndef hook(t, v, tb):\n    import traceback\n    print(t, v, v.__traceback__ is tb, traceback.format_tb(tb))\nsys.excepthook = hook\n1/0",
    "hook exits": "import sys\ndef hook(*a):\n    print('hook')\n    raise SystemExit(7)\nsys.excepthook = hook\n1/0",
    "hook fails": "import sys\ndef hook(*a):\n    {}['gone']\nsys.excepthook = hook\n1/0",
    "hook fails in a chain": "import sys\ndef hook(*a):\n    try:\n        1/0\n    except Exception:\n        {}['gone']\nsys.excepthook = hook\nint('x')",
    "hook none": "import sys\nsys.excepthook = None\n1/0",
    "hook restored": "import sys, atexit\ndef hook(*a): print('hook')\nsys.excepthook = hook\natexit.register(lambda: print(sys.excepthook is hook))\n1/0",
    "hook default": "import sys, atexit\natexit.register(lambda: print(sys.excepthook is sys.__excepthook__))\n1/0",
    "last": "import sys, atexit, traceback\natexit.register(lambda: print(sys.last_type, sys.last_value, traceback.format_tb(sys.last_traceback), sys.exc_info()))\n1/0",
    "stderr none": "import sys\nsys.stderr = None\n1/0",
    "stderr replaced": "import sys, io\nsys.stderr = io.StringIO()\n1/0",
    "stdout closed": "import sys\nprint('x')\nsys.stdout.close()",
    "fork": "import os, sys\nif os.fork() == 0:\n    raise ValueError('in the child')\nprint(os.wait()[1] >> 8)",
    "fork exits": "import os, sys\nif os.fork() == 0:\n    sys.exit(3)\nprint(os.wait()[1] >> 8)",
    "settrace": "import sys\nseen = []\ndef trace(f, e, a):\n    seen.append((e, f.f_code.co_name)); return trace\ndef g(): return 1\nsys.settrace(trace)\ng()\nsys.settrace(None)\nprint(seen)",
    "traced error": "import sys\nsys.settrace(lambda *a: None)\n1/0",
    "own tracebacks": "import traceback\ntry:\n    1/0\nexcept Exception:\n    traceback.print_exc()",
    "del main": "import sys\ndel sys.modules['__main__']\nprint(__name__)\n1/0",
    "clear globals": "globals().clear()\n1/0",
    "builtins": "import builtins\nprint(__builtins__ is builtins)\nbuiltins.exec = builtins.print = None\n1/0",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_ending(name: str) -> None:
    same(program(ENDINGS[name]))


@pytest.mark.parametrize("name", ["exit 3", "exception", "interrupt", "hook fails", "chain"])
def test_ending_of_a_module(name: str) -> None:
    program(ENDINGS[name])
    same("-m", "prog")


def test_the_interrupt_is_a_death_by_signal() -> None:
    assert same(program("raise KeyboardInterrupt")).code == -signal.SIGINT


def test_an_uncaught_exception_is_recorded(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    ours = run(bootstrapped([program("def f():\n    raise ValueError('told')\nf()")]))
    told = json.loads(error_file.read_bytes())["message"]
    assert told["message"] == "ValueError: told"
    assert told["extraInfo"]["py_callstack"].encode() == ours.err
    error_file.unlink()
    for name in ("exit 3", "interrupt", "fork", "thread", "atexit fails"):
        run(bootstrapped([program(ENDINGS[name])]))
        assert not error_file.exists(), name


def test_a_module_of_the_users_is_not_run_to_record_an_exception(tmp_path: Path) -> None:
    for name in ("json", "traceback", "linecache", "tokenize", "types"):
        program("print('side effect')", f"{name}.py")
    if sys.version_info < (3, 13):  # from there on the interpreter itself imports traceback
        assert same(program("raise ValueError('told')")).out == b""
    else:
        run(bootstrapped([program("raise ValueError('told')")]))
    assert json.loads((tmp_path / "error.json").read_bytes())["message"]["message"] == "ValueError: told"


# -- what programs do -------------------------------------------------------------------------------

DOINGS: dict[str, str] = {
    "pickle": "import pickle\nclass A:\n    pass\nprint(pickle.dumps(A()), type(pickle.loads(pickle.dumps(A()))) is A)",
    "dataclass": "from __future__ import annotations\nimport dataclasses, typing\n@dataclasses.dataclass\nclass A:\n    x: int\n    y: typing.ClassVar[int] = 1\nprint(A(3), dataclasses.fields(A))",
    "getsource": "import inspect, sys\ndef f():\n    return 1  # here\nprint(inspect.getsource(f), inspect.getsourcefile(f), inspect.getmodule(f))\nprint(inspect.getsource(sys.modules['__main__']))",
    "linecache": "import linecache\nprint(linecache.getline(__file__, 1, globals()), __loader__.get_source('__main__'))",
    "type hints": "import typing\nclass A: pass\ndef f(a: 'A') -> 'list[A]': pass\nprint(typing.get_type_hints(f))",
    "import main": "import __main__\nx = 3\nprint(__main__.x, __main__, __main__.__dict__ is globals(), dir())",
    "import itself": "print(__name__)\nif __name__ == '__main__':\n    import prog\n    print(prog.__file__ == __file__)",
    "runpy": "import runpy, sys\nif __name__ == '__main__':\n    print(sorted(runpy.run_path(__file__, run_name='again')))",
    "stdin": "import sys\nprint(input(), sys.stdin.readlines())",
    "deep warning": "import warnings\nfor level in (1, 2, 3, 9):\n    warnings.warn(f'level {level}', stacklevel=level)",
    "deprecation": "import warnings\nfor level in (1, 2, 3):\n    warnings.warn(f'level {level}', DeprecationWarning, stacklevel=level)\ndef f():\n    warnings.warn('in f', DeprecationWarning, stacklevel=2)\nf()",
    "resource": "import warnings\nwarnings.simplefilter('always')\nopen(__file__)\n",
    "logging": "import logging\nlogging.basicConfig(format='%(module)s %(lineno)d %(funcName)s %(pathname)s')\nlogging.warning('x')\nlogging.warning('y', stacklevel=1)",
    "subprocess": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, sys.orig_argv)'], capture_output=True).stdout)",
    "re-exec": "import os, sys\nif 'again' not in sys.argv:\n    sys.stdout.flush()\n    os.execv(sys.executable, sys.orig_argv + ['again'])\nprint(sys.argv, sys.orig_argv)",
    "flags for children": "import subprocess\nprint(subprocess._args_from_interpreter_flags())",
    "namespace": "print(list(globals()), list(vars()), list(locals()))",
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.garbage, gc.get_freeze_count())",
    "threads": "import threading, sys\nprint(threading.enumerate(), threading.main_thread(), len(sys._current_frames()))",
    "doctest": "'''\n>>> 1 + 1\n2\n>>> f()\n4\n'''\ndef f(): return 3\nimport doctest\ndoctest.testmod()",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self): print(self.id())\nunittest.main(argv=['x', '-q'], exit=False, testRunner=unittest.TextTestRunner(stream=open('/dev/null', 'w')))",
    "argparse": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int)\np.parse_args(['--n', 'x'])",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    raise ValueError('async')\nasyncio.run(main())",
    "pools": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as p:\n    print(list(p.map(str, range(3))))\n    p.submit(int, 'x').result()",
    "contextvars": "import contextvars\nprint(len(contextvars.copy_context()))",
    "warn registry": "import sys, warnings\nwarnings.warn('x', stacklevel=5)\nprint('__warningregistry__' in globals(), hasattr(sys, '__warningregistry__'))",
    "binary": "import sys\nsys.stdout.buffer.write(bytes(range(256)))\nsys.stderr.buffer.write(b'\\xff\\0')\nprint('ü\\udcff')",
}  # fmt: skip


@pytest.mark.parametrize("name", DOINGS)
def test_doing(name: str) -> None:
    same(program(DOINGS[name]), stdin="first ü\nsecond\n".encode())


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("as_module", [False, True])
def test_multiprocessing(method: str, as_module: bool) -> None:
    program(f"""
        import multiprocessing, os, sys

        class Point:
            def __init__(self, x): self.x = x

        def work(point, queue):
            main = sys.modules["__main__"]
            queue.put((type(point) is Point, point.x, __name__, main.__file__, sys.argv, sys.path, Point.__module__))
            if point.x == 2:
                raise ValueError("in a child")

        if __name__ == "__main__":
            multiprocessing.set_start_method({method!r})
            queue = multiprocessing.SimpleQueue()
            for x in (1, 2):
                child = multiprocessing.Process(target=work, args=(Point(x), queue), name=f"child {{x}}")
                child.start()
                print(queue.get())
                child.join()
                print(child.exitcode)
    """)
    done = same(*(["-m", "prog"] if as_module else ["prog.py"]), "x")
    assert done.err.count(b"ValueError: in a child") == 1


def test_a_process_pool() -> None:
    program("""
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
                print(list(pool.map(double, range(4))))
    """)
    assert same("prog.py").out == b"[0, 2, 4, 6]\n"


def test_a_closed_standard_stream() -> None:
    program("import sys\nprint(sys.stdin, sys.stdout and 1, sys.stderr and 1, file=open('seen', 'w'))")
    for fd in (0, 1, 2):
        seen = []
        for argv in ([PYTHON, "prog.py"], bootstrapped(["prog.py"])):
            code = subprocess.call(
                ["/bin/sh", "-c", f'exec "$@" {fd}>&-', "sh", *argv], stderr=subprocess.DEVNULL, timeout=HUNG
            )
            seen.append((code, Path("seen").read_text()))
        assert seen[0] == seen[1]


# -- what differs, and how far ------------------------------------------------------------------------


def test_lines_arrive_when_they_are_printed() -> None:
    program("""
        import sys
        print("one")
        assert sys.stdin.readline()
        sys.stdout.write("two\\n")
    """)
    with subprocess.Popen(
        bootstrapped(["prog.py"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "one\n"  # while the worker waits for us
        worker.stdin.write("go\n")
        worker.stdin.flush()
        assert worker.stdout.read() == "two\n"


def test_a_crash_is_kept_beside_the_error_file_and_off_stderr(tmp_path: Path) -> None:
    ours = run(bootstrapped([program("import faulthandler\ndef f():\n    faulthandler._sigsegv()\nf()")]))
    assert ours == Ran(-signal.SIGSEGV, b"", b"")
    stack = (tmp_path / "error.json.stack").read_text()
    assert "Segmentation fault" in stack
    assert "in f" in stack


def test_a_faulthandler_of_the_users_stays() -> None:
    for flags in (["-X", "faulthandler"], ["-X", "dev"]):
        same(
            *flags,
            program(
                "import faulthandler, sys, os\nprint(faulthandler.is_enabled(), os.listdir('/proc/self/fd'))"
            ),
        )
    program(
        "import faulthandler\nfaulthandler.enable()\nfaulthandler.disable()\nprint(faulthandler.is_enabled())"
    )
    same("prog.py")


def test_without_an_error_file_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE)
    same(program("import os\nprint(sorted(os.listdir('/proc/self/fd')))\n1/0"))


def test_descriptors_of_ours_do_not_reach_programs_that_the_worker_starts() -> None:
    program("""
        import os, subprocess, sys
        list_fds = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", list_fds], close_fds=False)
    """)
    same("prog.py")


def test_a_descriptor_with_one_of_our_numbers_stays_the_users() -> None:
    program("import os\nprint(*[os.get_inheritable(fd) for fd in (10, 11, 12)], os.read(10, 9))")
    for argv in ([PYTHON, "prog.py"], bootstrapped(["prog.py"])):
        # A shell, because these numbers may be taken in the process of the tests.
        shell = ["/bin/bash", "-c", 'exec "$@" 10<prog.py 11<prog.py 12<prog.py', "bash", *argv]
        assert run(shell).out == b"True True True b'import os'\n"


def test_one_frame_lies_below_the_program() -> None:
    program("import sys, traceback\nprint(len(traceback.extract_stack()), sys._getframe().f_code.co_name)")
    assert run([PYTHON, "prog.py"]).out == b"1 <module>\n"
    assert run(bootstrapped(["prog.py"])).out == b"2 <module>\n"


def test_a_recursion_error_ends_alike() -> None:
    plain = run([PYTHON, program("def f(): f()\nf()")])
    ours = run(bootstrapped(["prog.py"]))
    assert (ours.code, ours.out) == (plain.code, plain.out)
    assert ours.err.splitlines()[-1] == plain.err.splitlines()[-1]


def test_without_site_only_os_is_there_early() -> None:
    show = "import sys\nprint(*sorted(sys.modules))"
    program(show)
    plain, with_os, ours = (
        set(run(argv).out.split())
        for argv in (
            [PYTHON, "-S", "prog.py"],
            [PYTHON, "-S", program(f"import os\n{show}", "with_os.py")],
            bootstrapped(["-S", "prog.py"]),
        )
    )
    assert ours == plain | with_os


# -- the same through a real group --------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
def warm(request: pytest.FixtureRequest) -> bool:
    """A new interpreter, or the fork of one."""
    return bool(request.param)


def as_worker(tmp_path: Path, warm: bool, *args: str) -> tuple[Ran, dict[str, Any]]:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL)
    group = SubprocessContext("prog", PYTHON, {0: args}, {0: {}}, specs, options=GroupOptions(warm=warm))
    with group:
        group.start()
        assert (group.spawner_kind != "exec") is warm
        result = group.wait(HUNG)
    assert result is not None
    code = result.failures[0].exitcode if result.is_failed() else 0
    told = result.failures[0].error_file_data if result.is_failed() else {}
    return ran(code, Path(result.stdouts[0]).read_bytes(), Path(result.stderrs[0]).read_bytes()), told


IN_A_GROUP = [
    "exit 3", "exit text", "exception", "interrupt", "real interrupt", "hook fails", "hook restored", "atexit",
    "thread outlives error", "abort", "fork",
]  # fmt: skip


@pytest.mark.parametrize("name", IN_A_GROUP)
def test_endings_in_a_group(name: str, warm: bool, tmp_path: Path) -> None:
    plain = run([PYTHON, program(ENDINGS[name])])
    ours, _ = as_worker(tmp_path, warm, "prog.py")
    assert ours == plain


@pytest.mark.parametrize("name", ["getsource", "deep warning", "binary", "namespace", "threads", "pools"])
def test_doings_in_a_group(name: str, warm: bool, tmp_path: Path) -> None:
    plain = run([PYTHON, program(DOINGS[name])])
    ours, told = as_worker(tmp_path, warm, "prog.py")
    assert ours == plain
    if plain.code:
        assert "ValueError" in told["message"]["message"]


@pytest.mark.parametrize("flags", ["", "-u", "-O -I"])
def test_what_a_program_finds_in_a_group(flags: str, warm: bool, tmp_path: Path) -> None:
    args = [*flags.split(), program(PROBE), "x"]
    plain = json.loads(run([PYTHON, *args]).out)
    ours = json.loads(as_worker(tmp_path, warm, *args)[0].out)
    # The environment is the group's affair, and the streams under -u have a class of ours at their bottom.
    for data in (plain, ours):
        del data["environment"], data["stdin"]
        for stream in ("stdout", "stderr"):
            data[stream] = [part for part in data[stream] if part not in ("FileIO", "LogFile")]
    if warm:
        # One worker of a group writes down what is imported, for the next start.
        assert ours["meta_path"].pop(0) == "ImportRecorder"
        more = set(ours.pop("modules")) - set(plain.pop("modules"))
        assert {name.partition(".")[0] for name in more} <= sys.stdlib_module_names
        del plain["cache"], ours["cache"]
    assert ours == plain
