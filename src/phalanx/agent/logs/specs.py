"""Where the output of workers goes: which streams are redirected, which are shown, and file names.

    <log_dir>/<run_id>_<unique>/attempt_<k>/<local_rank>/{stdout.log, stderr.log, error.json}

(`observe/log_layout.py` has the names, and finds and reads them.)

Invariants
- A directory is created exclusively and never reused. If workers start again without using up a restart
  (membership changed), the attempt number stays the same: the second such start gets `attempt_0.1`, the
  third `attempt_0.2`. No file is deleted or overwritten.
- A run ID is untrusted input. It becomes exactly one path component, or is rejected.
- Without a log_dir, a private directory (0700) is created on first use.
- Directories and files are private (0700, 0600) whatever the umask. Only a directory that already exists
  keeps its mode: to let others read logs, change the mode of the directories of a run afterwards.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from enum import IntFlag

from phalanx.core.record import Record
from phalanx.job.environment import ERROR_FILE, temporary_directory
from phalanx.observe.log_layout import ERROR, STREAMS, filtered_file, log_file, start_folder
from phalanx.trusted_files import make_directory

__all__ = ["DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std", "to_map"]

KEPT = 7 * 86400.0  # seconds that temporary directories stay
_DEFAULT_RUN_ID = "none"
_LONGEST_RUN_ID = 200  # leaves room for the unique part within the usual 255 bytes of a file name


class Std(IntFlag):
    """A set of a worker's output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """`"3"` for all ranks, or `"0:3,1:0,12:1"` by local rank."""
        parts = [part.split(":") for part in vm.split(",")]
        if len(parts) == 1 and len(parts[0]) == 1:
            return cls._digit(parts[0][0], vm)
        found: dict[int, Std] = {}
        for part in parts:
            if len(part) != 2 or not (part[0].isascii() and part[0].isdigit()):
                raise cls._bad(vm)
            found[int(part[0])] = cls._digit(part[1], vm)
        return found

    @classmethod
    def _digit(cls, text: str, whole: str) -> Std:
        if text not in ("0", "1", "2", "3"):
            raise cls._bad(whole)
        return cls(int(text))

    @staticmethod
    def _bad(vm: str) -> ValueError:
        return ValueError(
            f"{vm!r} is not a valid set of streams; use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or one per local rank, such as 0:3,1:0"
        )


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """One `Std` for each local rank; NONE for ranks that a map omits."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


class LogsDest(Record, frozen=False):
    """Local rank -> path. An empty path or no entry: the stream is not redirected, or not shown."""

    stdouts: dict[int, str] = {}
    stderrs: dict[int, str] = {}
    tee_stdouts: dict[int, str] = {}
    tee_stderrs: dict[int, str] = {}
    error_files: dict[int, str] = {}
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """What the user asked for; `reify` creates the paths for one start of the group."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations for workers with these environments, by local rank."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory that contains all logs."""


class DefaultLogsSpecs(LogsSpecs):
    """One directory per run, start and rank under `log_dir`, or under a private temporary directory."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        *,
        ranks_filter: set[int] | None = None,
        keep_logs: float | None = KEPT,
    ) -> None:
        """`log_dir` /dev/null: no files; workers write to the console, whatever is redirected.

        `ranks_filter` is that of torchrun by global rank; both must accept a rank.
        `keep_logs`: seconds after which temporary directories of other runs are removed; None: never."""
        # An empty name (for example of an unset variable) must not mean the current directory.
        log_dir = os.path.abspath(log_dir) if log_dir else None
        if log_dir not in (None, os.devnull):
            _make_log_dir(log_dir)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._given = log_dir
        self._ranks_filter = ranks_filter
        self._keep_logs = keep_logs
        self._run_dirs: dict[str, str] = {}

    @property
    def is_temporary(self) -> bool:
        """Whether the logs are in a temporary directory."""
        return self._given is None

    @property
    def has_no_files(self) -> bool:
        """Whether nothing is written: the directory is /dev/null."""
        return self._given == os.devnull

    def remove_empty(self) -> None:
        """Remove the empty directories of a temporary directory, if one was created."""
        if self.is_temporary and self._root_log_dir is not None:
            _remove_directories(self._root_log_dir)

    def clean_up(self, succeeded: bool) -> None:
        """Leave no temporary directory behind that holds nothing of use, and none of old runs."""
        if not self.is_temporary or self._root_log_dir is None:
            return
        from phalanx.agent.logs import temporary_logs

        holds_output = any(
            std if isinstance(std, Std) else any(std.values()) for std in (self._redirects, self._tee)
        )
        if succeeded and not holds_output:
            temporary_logs.remove(self._root_log_dir)
        else:
            self.remove_empty()
        if self._keep_logs is not None:
            temporary_logs.remove_old(os.path.dirname(self._root_log_dir), kept=self._keep_logs)

    @property
    def root_log_dir(self) -> str:
        """The given directory, or the temporary one (created on first use)."""
        if self._root_log_dir is None:
            self._root_log_dir = _make_temporary()
        return self._root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the directories for one start of the group, and name the files in them.

        Each environment gets the name of the worker's error file."""
        if self.has_no_files:
            shown = {rank: "" if self._on_console(rank, envs[rank]) else os.devnull for rank in envs}
            for env in envs.values():
                env[ERROR_FILE] = ""  # else workers inherit that of the launcher
            return LogsDest(stdouts=shown, stderrs=dict(shown), error_files=dict.fromkeys(envs, os.devnull))
        first = envs.get(0) or next(iter(envs.values()), {})
        attempt_dir = self._new_attempt_dir(
            self.run_dir(first.get("TORCHELASTIC_RUN_ID") or _DEFAULT_RUN_ID),
            _attempt(first.get("TORCHELASTIC_RESTART_COUNT") or "0"),
        )
        out, err = STREAMS
        dest = LogsDest(
            filtered_stdout=os.path.join(attempt_dir, filtered_file(out)),
            filtered_stderr=os.path.join(attempt_dir, filtered_file(err)),
        )
        for rank in envs:
            rank_dir = os.path.join(attempt_dir, str(rank))
            os.mkdir(rank_dir, 0o700)
            dest.error_files[rank] = envs[rank][ERROR_FILE] = os.path.join(rank_dir, ERROR)
            streams = (
                (Std.OUT, log_file(out), dest.stdouts, dest.tee_stdouts),
                (Std.ERR, log_file(err), dest.stderrs, dest.tee_stderrs),
            )
            for which, name, paths, shown in streams:
                path = os.path.join(rank_dir, name)
                self._place(which, rank, path, self._on_console(rank, envs[rank]), paths, shown)
        return dest

    def _on_console(self, rank: int, env: dict[str, str]) -> bool:
        everywhere = int(env.get("RANK") or rank)
        return (not self._local_ranks_filter or rank in self._local_ranks_filter) and (
            not self._ranks_filter or everywhere in self._ranks_filter
        )

    def _place(
        self,
        which: Std,
        rank: int,
        path: str,
        on_console: bool,
        paths: dict[int, str],
        shown: dict[int, str],
    ) -> None:
        """Decide for one stream of one rank whether it has a file and whether it is shown."""
        if which & _of(self._tee, rank):
            paths[rank] = path
            if on_console:
                shown[rank] = path
        elif which & _of(self._redirects, rank):
            paths[rank] = path
        else:
            # Without a file, the worker writes to the console itself, unless its rank is filtered out.
            paths[rank] = "" if on_console else os.devnull

    def run_dir(self, run_id: str) -> str:
        """The directory of a run, made on first use."""
        known = self._run_dirs.get(run_id)
        if known is not None and os.path.isdir(known):
            return known
        name = _path_component(run_id)
        root = self.root_log_dir
        try:
            make_directory(root)  # it may have been deleted since
            made = _make_unique(root, name)
        except PermissionError as error:
            raise _not_writable(root, error) from error
        self._run_dirs[run_id] = made
        return made

    @staticmethod
    def _new_attempt_dir(run_dir: str, attempt: int) -> str:
        again = 0
        while True:
            path = os.path.join(run_dir, start_folder(attempt, again))
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                if not _holds_files(path):
                    _remove_directories(path)  # of a start that never began
                if os.path.exists(path):
                    again += 1
                continue
            except PermissionError as error:
                raise _not_writable(run_dir, error) from error
            return path

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects!r}, "
            f"tee={self._tee!r}, local_ranks_filter={self._local_ranks_filter})"
        )

    def _asked(self) -> tuple[object, ...]:
        return self._given, self._redirects, self._tee, self._local_ranks_filter, self._ranks_filter

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._asked() == other._asked()

    __hash__ = None  # type: ignore[assignment]  # equal by value, and the values are mutable


def _of(wanted: Std | dict[int, Std], rank: int) -> Std:
    return wanted if isinstance(wanted, Std) else wanted.get(rank, Std.NONE)


def _attempt(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"TORCHELASTIC_RESTART_COUNT={text!r}: not a number of restarts; use 0, 1, 2, …")
    return int(text)


def _path_component(run_id: str) -> str:
    """The run ID as the start of a directory name; raises ValueError if it cannot safely be one."""
    advice = "use letters, digits, '-', '_' and '.'"
    if "/" in run_id or os.sep in run_id or (os.altsep and os.altsep in run_id):
        raise ValueError(f"run id {run_id!r}: must not contain a path separator; {advice}")
    if any(ord(c) < 32 or ord(c) == 127 for c in run_id):
        raise ValueError(f"run id {run_id!r}: must not contain control characters; {advice}")
    if run_id.startswith("."):
        raise ValueError(f"run id {run_id!r}: must not start with a dot; {advice}")
    length = len(os.fsencode(run_id))
    if length > _LONGEST_RUN_ID:
        raise ValueError(
            f"run id {run_id[:20]!r}…: {length} bytes; at most {_LONGEST_RUN_ID} fit a file name"
        )
    return run_id


def _make_unique(parent: str, name: str) -> str:
    """A new directory `<name>_<unique>`; importing tempfile takes longer than the rest of the start."""
    while True:
        path = os.path.join(parent, f"{name}_{os.urandom(4).hex()}")
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path


def _make_temporary() -> str:
    parent = temporary_directory()
    try:
        return _make_unique(parent, f"phalanx_{os.getpid()}")
    except OSError as error:
        remedy = "set TMPDIR to a directory that this user can write to, or give --log-dir"
        why = f"no directory for logs can be made in {parent} ({error.strerror}); {remedy}"
        raise OSError(error.errno, why) from error


def _make_log_dir(path: str) -> None:
    try:
        make_directory(path)
        if not os.path.isdir(path):
            raise NotADirectoryError
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"log_dir {path!r} is a file, or is below one; use a directory") from error
    except PermissionError as error:
        raise _not_writable(path, error) from error
    except OSError as error:
        raise OSError(
            error.errno, f"log_dir {path!r} cannot be created ({error.strerror}); use another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_writable(path, None)


def _not_writable(path: str, error: OSError | None) -> PermissionError:
    why = error.strerror if error else "Permission denied"
    return PermissionError(f"log_dir {path!r} is not writable ({why}); use another, or change its mode")


def _holds_files(directory: str) -> bool:
    return any(files for _, _, files in os.walk(directory))


def _remove_directories(top: str) -> None:
    """Remove a directory and those below it, as far as they are empty."""
    for directory, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            pass  # not empty, or already removed
