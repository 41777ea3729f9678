"""NCCL's own report of a hang: who is asked, and what is taken from the answer.

NCCL itself needs GPUs (bench/gpu/nccl.py asks the real one); here a process answers in its place.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.agent.supervision import nccl_ras
from phalanx.agent.supervision.nccl_ras import RasQuery, address, complaints, listens
from phalanx.job.environment import NCCL_RAS

QUIET = """\
NCCL version 2.28.9 compiled with CUDA 13.0

Job summary
===========

  Nodes  Processes
      1          1

Errors
======

Warnings
========

"""
LOUD = """\
Communicators... (2.00s)
=============

Group     Comms     Status  Errors
    0         1    RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 10.0.0.2

Warnings
========

MISMATCH
  Communicator ranks have different collective operation counts

Anything else
=============

not a complaint
"""
SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    asked = b""
    while not asked.endswith(b"status\\n"):
        asked += peer.recv(100)
    peer.sendall(b"OK\\n" + sys.argv[1].encode())
    peer.close()
"""


def test_complaints_are_the_lines_under_errors_and_warnings() -> None:
    assert complaints(QUIET) == []
    assert complaints("") == complaints("Errors") == complaints("=====") == []
    assert complaints(LOUD) == [
        "INCOMPLETE",
        "Missing communicator data from 1 job process",
        "Process 3487984 on node 10.0.0.2",
        "MISMATCH",
        "Communicator ranks have different collective operation counts",
    ]
    assert len(complaints("Errors\n======\n" + "x" * 999 + "\ny" * 999)) == 12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("localhost", 28028)),
        ("127.0.0.1:13", ("127.0.0.1", 13)),
        ("[::1]:4000", ("::1", 4000)),
        ("host", None),
        (":1", None),
        ("host:", None),
        ("host:x", None),
        ("host:0", None),
        ("host:65536", None),
    ],
)
def test_the_address_is_that_of_nccls_variable(text: str, expected: tuple[str, int] | None) -> None:
    assert address(text) == expected


def test_a_port_belongs_to_the_process_that_listens_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert listens(port, [os.getpid()])
        assert not listens(port, [os.getppid()])
        assert not listens(port, [])
        assert not listens(free.getsockname()[1], [os.getpid()])
    assert not listens(port, [os.getpid()])


def test_only_a_worker_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "DEVICES", ("/dev/null",))  # as if there was a GPU
    server = subprocess.Popen([sys.executable, "-c", SERVER, LOUD], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        monkeypatch.setenv(NCCL_RAS, f"127.0.0.1:{int(server.stdout.readline())}")
        path = str(tmp_path / "nccl_ras.txt")
        stranger = _answer(RasQuery([os.getpid()], path))
        assert (stranger.path, stranger.complaints) == ("", [])
        assert not os.path.exists(path)
        own = _answer(RasQuery([server.pid], path))
        assert own.path == path
        assert own.complaints[0] == "INCOMPLETE"
        with open(path) as file:
            assert file.read() == LOUD
        monkeypatch.setattr(nccl_ras, "DEVICES", ())
        without = _answer(RasQuery([server.pid], ""))
        assert (without.path, without.complaints) == ("", [])
        monkeypatch.setattr(nccl_ras, "DEVICES", ("/dev/null",))
        unkept = _answer(RasQuery([server.pid], ""))
        assert (unkept.path, len(unkept.complaints)) == ("", 5)
    finally:
        server.kill()
        server.communicate()
    gone = _answer(RasQuery([server.pid], path))
    assert (gone.path, gone.complaints) == ("", [])


def _answer(query: RasQuery) -> RasQuery:
    end = time.monotonic() + 60
    while not query.done:
        assert time.monotonic() < end, "hung"
        time.sleep(0.005)
    return query
