"""A DNS server for hosts of tests.support.netns, whose names appear when a test says so.

Run as a program, it answers from a file of lines `name address`, which it reads for every question; a name
that is not there does not exist, and while the file has the line `silent`, nothing is answered at all.
Every question is a line on its stdout, so that a test can wait for one.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

ADDRESS = "10.77.0.254"
_A, _IN = 1, 1


class Inside(NamedTuple):
    """A host on which names are asked for here."""

    inside: tuple[str, ...]


class LateNames:
    """The server, beside the switch of a network."""

    def __init__(self, switch: str, folder: Path) -> None:
        self._switch, self._zone = switch, folder / "zone"
        self.resolver = folder / "resolv.conf"
        # As in a pod: a name of few dots is tried in several domains. A question without an answer hangs.
        self.resolver.write_text(
            f"nameserver {ADDRESS}\nsearch default.svc.cluster.local svc.cluster.local\n"
            "options ndots:5 timeout:30 attempts:5\n"
        )
        self._zone.write_text("")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LateNames:
        subprocess.run(
            ["ip", "-n", self._switch, "addr", "add", f"{ADDRESS}/24", "dev", "sw0"],
            check=True,
            capture_output=True,
        )
        server = [sys.executable, __file__, str(self._zone)]
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *server], stdout=subprocess.PIPE, text=True
        )
        self.wait_for("serving")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def wait_for(self, word: str) -> None:
        """Until a line of the server has this in it."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if word in line:
                return
        raise AssertionError(f"the DNS server has ended; nobody asked for {word}")

    def set(self, *lines: str) -> None:
        """From now on, these are the names."""
        draft = self._zone.with_suffix(".new")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self._zone)

    def on(self, inside: Sequence[str]) -> Inside:
        """The same host with this server; the names of the machine itself are not known there."""
        mount = 'mount --bind "$0" /etc/resolv.conf && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        hosts = self.resolver.with_name("hosts")
        hosts.write_text("127.0.0.1 localhost\n")
        return Inside((*inside, "sh", "-c", mount, str(self.resolver), str(hosts)))


def _name(question: bytes) -> str:
    labels, at = [], 0
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += 1 + question[at]
    return ".".join(labels)


def _serve(zone: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((ADDRESS, 53))
        os.write(1, b"serving\n")
        os.set_blocking(1, False)
        while True:
            data, peer = sock.recvfrom(2048)
            name = _name(data[12:])
            end = 12 + len(name) + 2 + 4
            kind = struct.unpack("!H", data[end - 4 : end - 2])[0]
            lines = Path(zone).read_text().splitlines()
            known = dict(line.split() for line in lines if " " in line)
            try:
                os.write(1, f"{name}\n".encode())
            except BlockingIOError:
                pass  # no test reads them
            if "silent" in lines:
                continue
            address = known.get(name.lower())
            answers = address is not None and kind == _A
            code = 0 if address is not None else 3
            reply = data[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, int(answers), 0, 0) + data[12:end]
            if answers:
                assert address is not None
                reply += struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4) + socket.inet_aton(address)
            sock.sendto(reply, peer)


if __name__ == "__main__":
    _serve(sys.argv[1])
