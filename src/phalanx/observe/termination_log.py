"""Why a job ended, in a small file for whatever runs the launcher.

Kubernetes reads `/dev/termination-log` of a container that has ended and shows it in `kubectl describe pod`.
The file is written once, at the end of a job that failed, was stopped by a signal or could not begin; a job
that succeeds leaves it alone. At most 4,096 bytes are read there, so no more are written, and no character is
cut. The default file is only used where it exists; one that was asked for is made.
"""

from __future__ import annotations

import os
import stat

DEFAULT = "/dev/termination-log"
LIMIT = 4096


def bare(text: str) -> str:
    """A report without colours and rules, which a terminal needs and a small file has no room for."""
    if "\x1b" in text:
        import re

        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line for line in text.splitlines() if line.strip("=-")).strip()


def cut(text: str, limit: int = LIMIT) -> bytes:
    """The start of a text as UTF-8, at most `limit` bytes, without half a character at its end."""
    data = text.encode("utf-8", "backslashreplace")
    return data if len(data) <= limit else data[:limit].decode("utf-8", "ignore").encode()


def write(path: str, text: str) -> None:
    """Write the reason to the file, or to the default one if it is there; whatever fails, fails silently.

    The end of a job does not wait: a pipe without a reader, say, is left alone.
    """
    text = text.strip()
    if not text:
        return
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path or DEFAULT, flags | (os.O_CREAT if path else 0), 0o644)
    except OSError:
        return  # there is none, or it cannot be written
    try:
        if path or stat.S_ISREG(os.fstat(fd).st_mode):
            os.write(fd, cut(text))
    except OSError:
        pass
    finally:
        os.close(fd)
