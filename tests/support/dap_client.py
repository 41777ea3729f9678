"""A small client of the Debug Adapter Protocol: what an editor says to debugpy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Any

from tests.conftest import HUNG


class Session:
    """One debugged process, from `initialize` to `terminated`; stops at the breakpoint, looks, goes on."""

    def __init__(
        self, owner: Debugged, reading: IO[bytes], writing: IO[bytes], start: dict[str, Any]
    ) -> None:
        self._owner = owner
        self._reading, self._writing = reading, writing
        self._start = start
        self._sent = 0

    def run(self) -> None:
        """Answer what the debugger says, until the process has ended."""
        self._request("initialize", adapterID="test", clientID="test", pathFormat="path", linesStartAt1=True)
        while (message := self._receive()) is not None:
            what = message.get("event") or message.get("command")
            body = message.get("body") or {}
            if message["type"] == "response" and not message["success"]:
                self._owner.notes.append(f"{what}: {message.get('message')}")
            elif what == "initialize":
                self._request(self._start["request"], **self._start)
            elif what == "initialized":
                place = {"source": {"path": self._owner.script}, "breakpoints": [{"line": self._owner.line}]}
                self._request("setBreakpoints", **place)
                self._request("configurationDone")
            elif what == "debugpyAttach":
                self._owner.attach(body)
            elif what == "stopped":
                self._thread = body["threadId"]
                self._request("stackTrace", threadId=self._thread)
            elif what == "stackTrace":
                frame = body["stackFrames"][0]["id"]
                self._request("evaluate", expression=self._owner.expression, frameId=frame, context="watch")
            elif what == "evaluate":
                self._owner.stops.append(body["result"])
                self._request("continue", threadId=self._thread)
            elif what == "exited":
                self._owner.exit_code = body["exitCode"]
            elif what == "output":
                self._owner.notes.append(body.get("output", ""))
            elif what == "terminated":
                return

    def _request(self, command: str, **arguments: Any) -> None:
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self._writing.write(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        self._writing.flush()

    def _receive(self) -> dict[str, Any] | None:
        length = 0
        while (line := self._reading.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        message: dict[str, Any] | None = json.loads(self._reading.read(length)) if length else None
        return message


class Debugged:
    """A program that is started by debugpy, with `subProcess` on; `expression` is looked at in every stop."""

    def __init__(self, script: str, line: int, expression: str, **launch: Any) -> None:
        self.script, self.line, self.expression = script, line, expression
        self.stops: list[str] = []
        self.notes: list[str] = []
        self.exit_code: int | None = None
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._start = {
            "type": "python",
            "request": "launch",
            "console": "internalConsole",
            "subProcess": True,
            "cwd": os.path.dirname(script),
            **launch,
        }

    def __enter__(self) -> Debugged:
        self._adapter = subprocess.Popen(
            [sys.executable, "-m", "debugpy.adapter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._adapter.stdin is not None
        assert self._adapter.stdout is not None
        self._follow(Session(self, self._adapter.stdout, self._adapter.stdin, self._start))
        return self

    def attach(self, body: dict[str, Any]) -> None:
        """A process that the debugged one has started."""
        where = body["connect"]
        connection = socket.create_connection((where["host"], where["port"]), timeout=4 * HUNG)
        self._connections.append(connection)
        stream = connection.makefile("rwb")
        self._follow(Session(self, stream, stream, body))

    def _follow(self, session: Session) -> None:
        thread = threading.Thread(target=session.run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Wait for the end of every process."""
        for thread in self._threads:  # grows while the program starts others, before its own ends
            thread.join(4 * HUNG)
            assert not thread.is_alive(), f"hung; stops: {self.stops}; {''.join(self.notes)}"

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._adapter.kill()
        self._adapter.communicate()
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            thread.join(HUNG)
