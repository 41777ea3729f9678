"""Kept state on disk: written when a job ends without success, found by its next launch.

    DIR/run-ID/rank-N      the saves of a rank, each a record (save_record.py), its bytes and their checksum

A file is complete or not there: it is written under another name, flushed, and renamed. A save whose bytes
have changed on disk is left out; the others of the file are used. The checksum is zlib's CRC-32: 2.8 GiB/s of
one core, during which other threads run. Files and directories must belong to this user or root and be
writable by no one else (trusted_files.py), because workers unpickle what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from zlib import crc32

from phalanx.agent.state import save_record
from phalanx.trusted_files import check_directory, make_directory, open_trusted
from phalanx.worker.state.memory_file import SLOTS, MemoryFile, region_at

_CHUNK = 4 << 20
_CHECKSUM = 4  # bytes


class SpillStopped(Exception):
    """The rest is not written, because the agent must end."""


class SpillDirectory:
    """Where the state of one run is on disk."""

    def __init__(self, root: str, run_id: str) -> None:
        self.root = root
        self.path = os.path.join(os.path.abspath(root), f"run-{_as_name(run_id)}")

    def prepare(self) -> None:
        """Make the directory; OSError if it cannot be made or trusted."""
        make_directory(self.path)
        check_directory(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(13, "cannot be written to", self.path)

    def write(self, rank: int, file: MemoryFile, stopped: Callable[[], bool] = lambda: False) -> int:
        """Write what a rank has kept; the number of bytes, 0 if it has kept nothing."""
        saves = [
            (name, number, header) for name, number in file.names().items() for header in file.slots(number)
        ]
        if not saves:
            return 0
        path = self._file(rank)
        scratch = f"{path}.{os.urandom(8).hex()}"
        buffer = memoryview(bytearray(_CHUNK))
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            total = 0
            for name, number, header in saves:
                total += os.write(fd, save_record.pack(name, header))
                start = region_at(number, header.region)
                done = checksum = 0
                while done < header.used:
                    if stopped():
                        raise SpillStopped
                    part = buffer[: min(_CHUNK, header.used - done)]
                    # Not sendfile: offsets of the memory file are larger than those a disk's may have.
                    part = part[: os.preadv(file.fd, [part], start + done)]
                    part = part[: os.write(fd, part)]
                    checksum = crc32(part, checksum)
                    done += len(part)
                total += done + os.write(fd, checksum.to_bytes(_CHECKSUM, "little"))
            os.fsync(fd)
            os.replace(scratch, path)
            return total
        except BaseException:
            os.unlink(scratch)
            raise
        finally:
            os.close(fd)

    def exists(self, rank: int) -> bool:
        """Whether there is a file for this rank."""
        return os.path.lexists(self._file(rank))

    def read(self, rank: int, file: MemoryFile, stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """Bring what a rank had kept into an empty file; the saves that are damaged, in words.

        OSError or ValueError if the file cannot be used.
        """
        from phalanx.worker.state import memory_limit

        fd = open_trusted(self._file(rank))
        damaged = []
        try:
            left = os.fstat(fd).st_size
            if left > memory_limit.available():
                raise ValueError(f"{left / 1e9:.3f} GB do not fit into memory")
            while left:
                record = os.read(fd, save_record.SIZE)
                name, header = save_record.unpack(record)
                left -= save_record.SIZE + header.used + _CHECKSUM
                if left < 0:
                    raise ValueError("the file is cut short")
                number = file.number_of(name)
                room = file.room(number, SLOTS)
                if room is None:
                    raise ValueError(f"more saves of {name!r} than slots")
                header = header.replace(slot=room.slot, region=room.region)
                file.grow(number, header.region, 0, header.used)
                done = checksum = 0
                while done < header.used:
                    if stopped():
                        raise SpillStopped
                    data = os.read(fd, min(_CHUNK, header.used - done))
                    if not data:
                        raise ValueError("the file is cut short")
                    os.pwrite(file.fd, data, region_at(number, header.region) + done)
                    checksum = crc32(data, checksum)
                    done += len(data)
                if os.read(fd, _CHECKSUM) == checksum.to_bytes(_CHECKSUM, "little"):
                    file.publish(number, header)
                else:
                    file.release(number, header.region)
                    damaged.append(f"the bytes of {name!r}, step {header.step}, do not have their checksum")
        finally:
            os.close(fd)
        return damaged

    def clear(self) -> None:
        """Remove all of it: the job has succeeded."""
        try:
            for name in os.listdir(self.path):
                if name.startswith("rank-"):
                    os.unlink(os.path.join(self.path, name))
            os.rmdir(self.path)
        except OSError:
            pass  # of another node, or something else is in it

    def _file(self, rank: int) -> str:
        return os.path.join(self.path, f"rank-{rank}")


def _as_name(run_id: str) -> str:
    """A run ID as the name of a directory, whatever is in it; different ones stay different."""
    safe = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    text = "".join(letter if letter in safe else f"%{ord(letter):x}." for letter in run_id)
    if len(text) <= 150:
        return text
    from hashlib import sha256

    return f"{text[:80]}%{sha256(run_id.encode()).hexdigest()}"
