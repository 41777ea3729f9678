"""Preloads modules in the zygote, before it forks, so that the workers share one import.

Each rule is checked during the import, not promised by a list:
* Only installed packages and the standard library are preloaded. The user's own modules run in every worker;
  an installed package that imports one of them is skipped.
* A module that raises is skipped. A module is unsuitable if it leaves a thread that a fork does not stop,
  opens a device or a socket, starts a process, hangs, kills the process, or reads a variable that differs
  between workers (RANK) during its import (import_judge.py). So are the modules that import it. All of them
  are found in one pass (vetting.py).
* Effects of an import outside of memory are repeated in every worker: variables, printed text, and open files
  (with an offset of their own).

What is found goes into a log (verdict_log.py), which the agent reads, too. The keeper gets a line when
another process becomes the zygote (`zygote PID`), when the preload is over (`done`), and an empty one now and
then while modules are imported.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx import kernel
from phalanx.warm.generators import GeneratorPlan
from phalanx.warm.import_effects import ImportState, as_in_a_script
from phalanx.warm.import_judge import ImportJudge, checks
from phalanx.warm.import_recorder import homes as installed_in
from phalanx.warm.import_recorder import loads_code
from phalanx.warm.import_values import Renewal, checksum
from phalanx.warm.late_variables import LateVariables
from phalanx.warm.twin import Reserve
from phalanx.warm.variables import NotedVariables, VariableCheck
from phalanx.warm.verdict_log import ImportGate, covers
from phalanx.warm.vetting import Checkpoint, Scout, fork_checkpoint, kill_children, starts_no_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

    from phalanx.warm.import_judge import Check
    from phalanx.warm.twin import Comparison
    from phalanx.warm.verdict_log import VerdictLog

SPOILED = 77  # the exit status of a process that must not become the zygote

_NEVER = frozenset({"__main__", "phalanx", "sitecustomize", "usercustomize", "antigravity", "this"})
_REPORT_AFTER = 0.5  # seconds: the keeper need not wake up for every module
_CHECKPOINT_AFTER = 0.3  # seconds of imports; later on, a quarter of all of them

# The variables that differ between workers (agent/environment.py).
_OF_A_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OF_A_WORKER_PREFIXES = ("TORCHELASTIC_", "PHALANX_")


class ImportResidue:
    """Effects of the imports outside of memory, which `fork_setup` repeats in every worker."""

    def __init__(self) -> None:
        self.variables: dict[bytes, tuple[bytes | None, bytes | None]] = {}  # name → value before, and after
        self.printed: tuple[bytes, bytes] = (b"", b"")  # on stdout, on stderr
        self.files: dict[int, str] = {}  # descriptor → path
        self.read: dict[bytes, bytes | None] = {}  # variables that imports have read, and their values
        self.readers: dict[bytes, str] = {}  # the module whose import it was
        self.setters: dict[bytes, str] = {}  # the same for `variables`
        self.renewal: Renewal | None = None
        self.generators: GeneratorPlan | None = None

    def late_variables(self, spec: dict[str, Any]) -> LateVariables | None:
        """A watch over variables that the script sets too late; None where none was read."""
        if not self.read:
            return None
        return LateVariables(self.read, self.readers, spec)


left = ImportResidue()


def preload(lines: Iterable[str], log: VerdictLog, report: Callable[[str], None], how: str) -> None:
    """Import the modules, in this order; this process, or a fork of it, returns, and is the zygote.

    `lines` may contain the recorder's other lines: variables that the script sets before the following
    imports, and modules that the script shadows. `-NAME`: known to be unsuitable. `how`:

    empty    find all unsuitable modules, and import the others
    vetted   all were tried before: they are checked once more after their import, but not each part of it.
             The process exits if one of them is unsuitable now
    untried  nothing is known, and a start waits: the process exits if one of them is unsuitable. Before that,
             those that may have started threads in a worker are tried by themselves: most often they are the
             only ones in doubt, and take little time
    """
    import gc

    before = gc.get_threshold()
    gc.set_threshold(
        1 << 30, *before[1:]
    )  # one collection at the end is cheaper than those during the imports
    Preload(list(lines), log, report, how).run()
    gc.set_threshold(*before)  # a module that sets its own is not preloaded
    gc.collect()
    gc.freeze()  # or a collection in a worker would write into every shared page
    report("done")


class Preload:
    """One pass over a list."""

    def __init__(self, lines: list[str], log: VerdictLog, report: Callable[[str], None], how: str) -> None:
        self._lines = lines
        self._hidden = {line[1:] for line in lines if line.startswith("!")}
        self._refused = {line[1:] for line in lines if line.startswith("-")}
        self._log = log
        self._gate = ImportGate(log.fd)
        self._report = report
        self._vetted = how == "vetted"
        self._once = how != ""
        self._keeper = os.getppid()
        self._homes = installed_in()
        self._installed: dict[str, bool] = {}  # by top-level name
        self._own: dict[bytes, bytes | None] = {}  # variables that the script sets: their values before
        self._asked: list[str] = []  # variables of a worker that imports have read
        self._reserve: Reserve | None = None
        hints = dict(line[1:].split(" ") for line in lines if line.startswith("%"))
        if not starts_no_thread(hints):
            self._give_up(f"{next(iter(hints))}: may leave a thread running")
        if not self._vetted:
            self._reserve = self._make_reserve()
        self._console = _Console()
        self._fds = _descriptors()
        self._state = ImportState()
        own_checks: list[Check] = [self._state.check]
        if not self._vetted:
            own_checks.append(VariableCheck(lines, left.read))
        self._judge = ImportJudge(
            log,
            self._homes,
            [*checks(self._take_asked), *own_checks],
            self._forbidden,
            self._spoiled,
            self._progress,
        )
        self._judge.each_module = not self._vetted
        self._began = self._saved = self._reported = time.monotonic()
        self._checkpoint: Checkpoint | None = None
        self._ahead: Scout | None = None
        self._is_scout = False

    def _make_reserve(self) -> Reserve:
        """Returns in this process, in the twin, and in the reserve if it takes over."""
        while True:
            reserve = Reserve()
            if reserve.is_twin:
                self._log.part()
                self._keeper = os.getppid()
                self._report = lambda line: None
            elif reserve.takes_over:
                self._log.read()
                self._report(f"zygote {os.getpid()}")
                continue
            else:
                reserve.start_twin()
            return reserve

    def run(self) -> None:
        """Import what can be."""
        with as_in_a_script(), self._judge:
            for line in self._lines:
                if line[:1] in ("+", "?"):
                    if loads_code(line[1:].partition("=")[0]):
                        break  # the recorder never writes one; what follows may depend on it
                    _set_for_script(line[0], line[1:], self._own)
                elif line[:1] not in ("!", "-", "=", "%", "@", "$"):
                    self._entry(line)
            self._log.write("over")
            if self._is_scout:
                assert self._checkpoint is not None
                assert self._reserve is not None
                kill_children(but=(self._checkpoint.pid, self._reserve.pid))
                os._exit(0)
        if self._checkpoint is not None:
            self._checkpoint.end()
        for variable, value in self._own.items():
            _put(variable, value)
            left.read.pop(variable, None)  # the script is going to set it
        self._compare()
        left.printed = self._console.printed()
        left.files = {
            int(fd): what for fd, what in _descriptors().items() if fd not in self._fds and _is_file(what)
        }
        self._log.write(f"ready {time.monotonic() - self._began:.3f}")

    def _compare(self) -> None:
        """See to what is random: with the help of the twin, or as it was found before."""
        reserve = self._reserve
        if reserve is None:
            fixed = {int(word) for line in self._lines if line.startswith("$") for word in line[1:].split()}
            left.renewal = Renewal(line[1:] for line in self._lines if line.startswith("@"))
            left.generators = GeneratorPlan(fixed)
            return
        if reserve.is_twin:
            kill_children()
            reserve.send({checksum(repr(after)) for _, after in left.variables.values()})
        self._log.read()
        if self._log.hung:
            reserve.start_twin()  # the first one hangs, too
        found = reserve.compare(lambda: self._report(""))
        random = self._random(found)
        left_out = self._ahead is not None or self._log.unsuitable or self._log.importers
        if not self._log.hung and (not found.all_there or (random and left_out)):
            reserve.start_twin()
            del found  # it refers to values whose references are counted
            found = reserve.compare(lambda: self._report(""))
            random = self._random(found)
        if random:
            for name in random:
                self._log.blame(name, "makes random values or temporary files during its import", ())
            if self._once:
                reserve.end()
                self._give_up(self._log.in_words()[0])
            reserve.take_over()
        reserve.end()
        renewals = found.values.renewals()
        for line in renewals:
            self._log.write(f"renew {line}")
        self._log.write(" ".join(["fixed", *map(str, sorted(found.fixed))]))
        left.renewal, left.generators = Renewal(renewals), GeneratorPlan(found.fixed)

    def _random(self, found: Comparison) -> list[str]:
        """The modules that made random values, or set variables to them."""
        return found.random + [
            left.setters[key]
            for key, (_, after) in left.variables.items()
            if checksum(repr(after)) not in found.fixed
        ]

    def _entry(self, name: str) -> None:
        if name not in sys.modules and self._is_eligible(name.partition(".")[0]):
            self._save()
            while self._ahead is not None and not self._ahead.has_passed(name):
                self._lead()
                self._save()
            if not self._is_refused(name):
                self._try(name)
        if self._ahead is None:
            self._log.write(f"passed {name}")
            if self._is_scout and self._checkpoint is not None:
                self._checkpoint.tell()

    def _is_eligible(self, top: str) -> bool:
        if top not in self._installed:
            allowed = top not in _NEVER and top not in self._hidden
            self._installed[top] = allowed and _is_installed(top, self._homes)
        return self._installed[top]

    def _is_refused(self, name: str) -> bool:
        return covers(self._refused, name) or self._log.is_unsuitable(name)

    def _try(self, name: str) -> None:
        with self._console:
            self._judge.look()  # what was done here is no module's effect
            if self._vetted:
                self._log.write(f"( {name}")
            imported, error = self._import(name)
            why = self._judge.look() if self._vetted else ""
        if why:
            self._give_up(f"{name}: {why}")
        if self._vetted:
            self._log.write(")")
        if not imported:
            self._console.forget()
        # An ImportError is not reported: optional imports are recorded as well.
        if error is not None and not isinstance(error, ImportError):
            self._log.blame(name, f"raises {type(error).__name__}", ())

    # -- unsuitable modules -------------------------------------------------------------------------

    def _forbidden(self, name: str) -> str | None:
        """Why this module must not be imported; empty: it is known to be unsuitable. None: it may be."""
        if name.partition(".")[0] in self._hidden:
            return "is shadowed by a module of the script"
        return "" if not self._is_scout and self._is_refused(name) else None

    def _spoiled(self) -> None:
        """This process must not become the zygote; its checkpoint may."""
        if self._is_scout:
            return
        if self._checkpoint is None:
            self._give_up(next(iter(self._log.in_words()), "a module: imports one that is unsuitable"))
        if self._ahead is not None:  # a scout is under way; the checkpoint knows now who imports what
            self._checkpoint.tell()
            os._exit(0)
        self._is_scout = True
        kernel.end_subreaper()  # a later checkpoint is the keeper's
        self._judge.note_importers()
        os.nice(max(0, 10 - os.nice(0)))  # it never becomes a worker, so that this need not be undone
        self._state.changed()  # by these lines, and by no module
        self._checkpoint.tell()

    def _give_up(self, why: str) -> NoReturn:
        self._log.write(f"spoiled {why}")
        os._exit(SPOILED)

    def _save(self) -> None:
        """Make a checkpoint if it is time for that. Returns again in the checkpoint when it is needed."""
        now = time.monotonic()
        if self._once or self._is_scout:
            return
        if self._checkpoint is not None:
            if now - self._saved < max(_CHECKPOINT_AFTER, (now - self._began) / 4):
                return
            self._checkpoint.end()
        self._saved = now
        made = fork_checkpoint(self._keeper, self._log)
        if isinstance(made, Checkpoint):
            self._checkpoint = made
            return
        self._checkpoint = None
        if self._ahead is not None and made.gone:  # killed by a module that did not kill the scout
            self._give_up("a module: ended the process")
        if self._ahead is None and made.gone:
            self._log.blame_executing()
        elif self._ahead is None:
            self._ahead = made
            self._judge.logs = False
        self._console.copy()
        self._report(f"zygote {os.getpid()}")
        self._save()

    def _lead(self) -> None:
        """The scout has ended early: blame what it executed, and go on without it."""
        if self._checkpoint is not None:  # it would follow
            self._checkpoint.end()
            self._checkpoint = None
        self._ahead = None
        self._judge.logs = True
        self._log.blame_executing()

    def _progress(self) -> None:
        self._gate.wait(lambda: self._report(""))
        now = time.monotonic()
        if now - self._reported >= _REPORT_AFTER:
            self._reported = now
            self._report("")

    def _take_asked(self) -> list[str]:
        asked = self._asked[:]
        self._asked.clear()
        return asked

    def _import(self, name: str) -> tuple[bool, BaseException | None]:
        """Whether the import succeeded, or what it raised."""
        environ: Any = os.environ
        before: dict[bytes, bytes] = environ._data
        during = environ._data = _Asked(before, self._asked)
        os.environb._data = during  # type: ignore[attr-defined]  # the two share it
        raised: BaseException | None = None
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
            raised = error
        finally:
            environ._data = os.environb._data = before  # type: ignore[attr-defined]
            for key in sorted(before.keys() | during.keys()):
                old, new = before.get(key), dict.get(during, key)  # not noted
                if old != new and not (new is None and _is_of_a_worker(key)):
                    # Undone for the following imports, which a worker may do first; repeated in every worker.
                    _put(key, old)
                    if raised is None:
                        left.variables[key] = (left.variables.get(key, (old, None))[0], new)
                        left.setters[key] = name
            for key in left.read:
                left.readers.setdefault(key, name)
        return raised is None, raised


class _Asked(NotedVariables):
    """The environment during an import: variables of a worker are missing, and access to them is noted."""

    def __init__(self, variables: dict[bytes, bytes], asked: list[str]) -> None:
        super().__init__((name, value) for name, value in variables.items() if not _is_of_a_worker(name))
        self.asked = asked
        self.read = left.read

    def __missing__(self, name: bytes) -> bytes:
        if _is_of_a_worker(name):
            self.asked.append(os.fsdecode(name))
        raise KeyError(name)


def _is_of_a_worker(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text in _OF_A_WORKER or text.startswith(_OF_A_WORKER_PREFIXES)


def _put(name: bytes, value: bytes | None) -> None:
    if value is None:
        os.environb.pop(name, None)
        os.unsetenv(name)  # C code may have set it
    else:
        os.environb[name] = value


def _set_for_script(word: str, text: str, own: dict[bytes, bytes | None]) -> None:
    name, _, value = (part.encode("utf-8", "surrogateescape") for part in text.partition("="))
    if word == "?" and name in os.environb:
        return
    own.setdefault(name, os.environb.get(name))
    _put(name, value)


class _Console:
    """Captures what is printed while it is entered: every worker prints it to its own log."""

    def __init__(self) -> None:
        from phalanx.kernel import anonymous_file

        self._kept = [anonymous_file("phalanx-printed") for _ in (1, 2)]
        self._sizes = [0, 0]

    def __enter__(self) -> None:
        self._flush()
        self._before = [_copy(fd) for fd in (1, 2)]
        for fd, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, fd)

    def __exit__(self, *error: object) -> None:
        self._flush()
        for fd, before in zip((1, 2), self._before, strict=True):
            if before is None:
                os.close(fd)
            else:
                os.dup2(before, fd)
                os.close(before)
        self._sizes_before, self._sizes = self._sizes, [os.fstat(kept).st_size for kept in self._kept]

    def forget(self) -> None:
        """Discard the output of the last import: the worker repeats it."""
        self._sizes = self._sizes_before
        for kept, size in zip(self._kept, self._sizes, strict=True):
            os.truncate(kept, size)
            os.lseek(kept, size, os.SEEK_SET)

    def copy(self) -> None:
        """In a fork: what was captured so far, in files of its own."""
        from phalanx.kernel import anonymous_file

        for index, size in enumerate(self._sizes):
            text = os.pread(self._kept[index], size, 0)
            os.close(self._kept[index])
            self._kept[index] = anonymous_file("phalanx-printed")
            os.write(self._kept[index], text)

    def printed(self) -> tuple[bytes, bytes]:
        out, err = (os.pread(kept, 1 << 20, 0) for kept in self._kept)
        for kept in self._kept:
            os.close(kept)
        return out, err

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                pass  # missing, or closed by an import


def _copy(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # it was closed at the start
        return None


def _is_installed(top: str, homes: tuple[str, ...]) -> bool:
    if top in sys.builtin_module_names:
        return True
    from importlib.machinery import PathFinder

    try:
        spec = PathFinder.find_spec(top)
    except Exception:  # noqa: BLE001 - a third-party import hook
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(place is not None and place.startswith(homes) for place in places)


def _descriptors() -> dict[str, str]:
    found = {}
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for fd in entries:
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


def _is_file(what: str) -> bool:
    return what.startswith("/") and os.path.isfile(what)
