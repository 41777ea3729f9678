"""How the logs of a run lie on disk: names, parts, holes. Nothing else knows the name of a file there.

    <run>/events.jsonl, summary.json, failure.json
    <run>/attempt_<k>[.<again>]/filtered_stdout.log, hang.txt, flight_recorder/, nccl_ras.txt
    <run>/attempt_<k>[.<again>]/<local rank>/error.json, stacks.txt, native-stacks.txt
                                             stdout.log                    the log
                                             stdout.log.000000104857600    a part of it

`agent/logs/specs.py` makes the directories, `agent/logs/rotation.py` the parts. The number of a part is the
offset of its first byte in the whole output. While the log is written, the bytes of its parts are a hole at
its beginning, and offsets into the log are offsets into the whole output. When its writers have ended, or a
worker has emptied it, the log begins where the last part ends; an empty last part marks that. Parts never
change. The oldest may be deleted.

Where a part begins, the part before it ends: a reader that knows one part finds the next by its name, and
lists the directory once, however many files are in it.

A worker can put anything into its directory. Only regular files count, links are not followed, and nothing
is waited for.
"""

from __future__ import annotations

import os
from bisect import bisect_right

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS = ("stdout", "stderr")

# In the directory of a run.
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
FAILURE = "failure.json"

# In that of a start.
HANG = "hang.txt"
TRACES = "flight_recorder"
NCCL = "nccl_ras.txt"

# In that of a worker.
ERROR = "error.json"
STACKS = "stacks.txt"
NATIVE_STACKS = "native-stacks.txt"

_ATTEMPT = "attempt_"
_DIGITS = 15  # of a part's number: so that names are in the order of the output
_LONGEST = 100  # characters of a name that can be one of a log
_BLOCK = 256 * 1024
_SAFELY = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_KIND, _REGULAR = 0o170000, 0o100000


class LogName(Record):
    """The log of one stream of one worker, or a part of it, by its place in the directory of a run."""

    attempt: int
    again: int  # how many starts before this one had the same attempt
    local_rank: int
    stream: str
    part: int | None = None  # None: the log itself

    @property
    def folders(self) -> tuple[str, str]:
        """The directories on the way from the one of the run."""
        return start_folder(self.attempt, self.again), str(self.local_rank)

    @property
    def file(self) -> str:
        name = log_file(self.stream)
        return name if self.part is None else part_path(name, self.part)

    @property
    def name(self) -> str:
        """The path below the directory of the run."""
        return "/".join((*self.folders, self.file))


def start_folder(attempt: int, again: int) -> str:
    """The directory of a start, in that of its run."""
    return f"{_ATTEMPT}{attempt}{f'.{again}' if again else ''}"


def log_file(stream: str) -> str:
    """The log of a stream, in the directory of its worker."""
    return f"{stream}.log"


def filtered_file(stream: str) -> str:
    """The lines of all workers that a filter chose, in the directory of a start."""
    return f"filtered_{stream}.log"


def worker_directory(error_file: str | None) -> str:
    """The directory of the worker with this error file; empty if it has no files."""
    return "" if not error_file or error_file == os.devnull else os.path.dirname(error_file)


def name_in_job(path: str) -> str:
    """`job7_ab12/attempt_0/3/stdout.log`: with the directory of the run, because nodes name files alike."""
    return "/".join(path.split(os.sep)[-4:])


def parse_name(name: str) -> LogName | None:
    """`attempt_0/3/stdout.log`, or a part; None for any other name."""
    attempt, _, rest = name[:_LONGEST].partition("/")
    rank, _, file = rest.partition("/")
    first, dot, again = attempt.removeprefix(_ATTEMPT).partition(".")
    stream, _, part = file.partition(".log")
    numbers = [first, rank, *([again] if dot else []), *([part[1:]] if part else [])]
    if stream not in STREAMS or not all(one.isascii() and one.isdecimal() for one in numbers):
        return None
    found = LogName(int(first), int(again or 0), int(rank), stream, int(part[1:]) if part else None)
    return found if found.name == name else None


def list_logs(directory: str, parts: bool = False) -> list[LogName]:
    """The logs of a run, with or without their parts, by start, rank and stream."""
    found = []
    for attempt in _names(directory, folders=True):
        if attempt.startswith(_ATTEMPT):
            for rank in _names(os.path.join(directory, attempt), folders=True):
                folder = os.path.join(directory, attempt, rank)
                for file in _names(folder, folders=False) if parts else map(log_file, STREAMS):
                    log = parse_name(f"{attempt}/{rank}/{file}")
                    if log is not None and _size(os.path.join(folder, file)) is not None:
                        found.append(log)
    return sorted(found, key=lambda one: (one.attempt, one.again, one.local_rank, one.file))


def _names(path: str, folders: bool) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                kind = entry.is_dir if folders else entry.is_file
                if kind(follow_symlinks=False):
                    yield entry.name
    except OSError:
        return


def part_path(path: str, offset: int) -> str:
    """The part of a log that begins at this offset of the whole output."""
    return f"{path}.{offset:0{_DIGITS}d}"


def open_log(path: str, folder: int | None = None) -> int:
    """A descriptor of a regular file (below an open folder); OSError for anything else."""
    fd = os.open(path, _SAFELY, dir_fd=folder)
    if os.fstat(fd).st_mode & _KIND != _REGULAR:
        os.close(fd)
        raise OSError(f"{path}: not a regular file")
    return fd


def data_at(fd: int, offset: int) -> int:
    """Where data begins at or after an offset: behind the hole, if it lies in one."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:  # the end of the file, or the file system does not tell
        return offset


def read_end(fd: int, most: int) -> tuple[bytes, bool]:
    """The last bytes of a log or a part, without its hole; whether they begin within what it holds."""
    begin = max(0, os.fstat(fd).st_size - most)
    data = os.pread(fd, most, data_at(fd, begin))
    found = data.lstrip(b"\0")  # a hole ends within a page, whose beginning is zeros
    return found, begin > 0 and len(found) == len(data)


def tail(path: str, most: int) -> str:
    """The last lines of a log; empty for what is not a file, or not there."""
    if not path or path == os.devnull:
        return ""
    try:
        fd = open_log(path)
    except OSError:
        return ""
    try:
        data, cut = read_end(fd, most)
    except OSError:
        return ""
    finally:
        os.close(fd)
    if cut:
        data = data.partition(b"\n")[2] or data
    return data.decode("utf-8", "replace")


class WholeLog:
    """Reads the whole output of a log by its offsets, wherever a byte is by now; also while it is rotated.

    A byte leaves the log only after its part has its name. So a block that was read from the log is valid if
    no new part has a name afterwards. Zeros, or a log that ends before the offset, can mean that parts have
    come and gone unseen: then the directory is listed again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts: list[int] | None = None  # of the parts; None: not listed so far
        self._end = 0  # of the last part
        self._base = 0  # offset of the first byte of the log
        self._length = 0

    def read(self, at: int) -> tuple[int, bytes]:
        """A block and its offset: `at`, or later if older parts are deleted; empty at the end."""
        while True:
            self._find_parts()
            starts = self._starts or [self._end]
            at = max(at, starts[0])
            if at < self._end:
                index = bisect_right(starts, at) - 1
                data = self._read_part(starts[index], at)
                if data:
                    return at, data
                del starts[: index + 1]  # deleted since
                at = starts[0] if starts else self._end
                continue
            data = self._read_log(at)
            doubtful = data[:1] == b"\0" or at > self._length
            if not (doubtful and self._list()) and not self._find_parts():
                return at, data

    def end(self) -> int:
        """The length of the whole output so far."""
        self._find_parts()
        self._read_log(self._end, 0)
        return self._length

    def _find_parts(self) -> bool:
        """Look for the parts that follow those that are known; whether there are any."""
        if self._starts is None:
            return self._list()
        known = self._end, self._base
        while (size := _size(part_path(self.path, self._end))) is not None:
            if not size:
                self._base = self._end
                break
            self._starts.append(self._end)
            self._end += size
        return known != (self._end, self._base)

    def _list(self) -> bool:
        """List the directory; whether that brought news."""
        known = self._starts, self._end, self._base
        folder, name = os.path.split(self.path)
        parts = {}
        for file in _names(folder or ".", folders=False):
            number = file.removeprefix(f"{name}.")
            if len(number) == _DIGITS and number.isascii() and number.isdecimal():
                parts[int(number)] = _size(os.path.join(folder, file)) or 0
        self._starts = sorted(start for start, size in parts.items() if size)
        self._end = max((start + size for start, size in parts.items()), default=0)
        if parts.get(self._end) == 0:
            self._base = self._end
        return known != (self._starts, self._end, self._base)

    def _read_part(self, start: int, at: int) -> bytes:
        try:
            fd = open_log(part_path(self.path, start))
        except OSError:
            return b""
        try:
            return os.pread(fd, _BLOCK, at - start)
        finally:
            os.close(fd)

    def _read_log(self, at: int, most: int = _BLOCK) -> bytes:
        try:
            fd = open_log(self.path)
        except OSError:
            self._length = self._end
            return b""
        try:
            size = os.fstat(fd).st_size
            if size < self._end - self._base:  # its worker has emptied it, or its writers have ended
                self._base = self._end
            self._length = self._base + size
            return os.pread(fd, most, at - self._base)
        finally:
            os.close(fd)


def _size(path: str) -> int | None:
    """The size of a regular file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if status.st_mode & _KIND == _REGULAR else None
