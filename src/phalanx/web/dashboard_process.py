"""`--dashboard`: the agent's side of the page. It opens the port and starts the process that serves there.

The process (web/dashboard) gets everything through its stdin: the token, the name of the agent's socket, and
at the end of the job how it ended. No secret is in its arguments or environment. The end of that pipe is its
end, and the kernel kills it with the agent's thread, so that it never outlives the agent. If it dies, the job
goes on without a page.

Invariants
- The link with the token goes to a terminal only. Elsewhere one line names the command that asks the agent
  for it, over the socket that knows its user.
- The page is opened once, by the node that has rank 0; it stays there until that agent ends.
- Without a viewer the agent does nothing for it.
"""

from __future__ import annotations

import os
import sys

from phalanx.core.record import Record
from phalanx.errors import PhalanxError
from phalanx.job.environment import without_secrets
from phalanx.job.time_budgets import PAGE_END
from phalanx.python_command import python_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.group.group import Phase

LOOPBACK = "127.0.0.1"
_BACKLOG = 128
_VANISHED = 60_000  # milliseconds that sent data may stay unread
_LONGEST_REPORT = 32768


class DashboardPlan(Record):
    """Where the page is served; `early`: there is one node only, which opens it before anything starts."""

    host: str
    port: int
    early: bool
    quiet: bool = False


class DashboardProcess:
    """The page of one job: a part of the owner loop, from the first start of workers to the end."""

    def __init__(self, plan: DashboardPlan, say: Callable[[str], None]) -> None:
        """PhalanxError if the address is to be opened now and cannot be."""
        self._plan = plan
        self._note = say
        self._token = os.urandom(24).hex()
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._opened = False
        self._socket_name: Callable[[], str] = lambda: ""
        self._is_first: Callable[[], bool] = lambda: False
        self._run_id: Callable[[], str] = lambda: ""
        self._clear: Callable[[], None] = lambda: None
        if plan.early:
            self._listen()

    def attach(
        self,
        socket_name: Callable[[], str],
        is_first: Callable[[], bool],
        run_id: Callable[[], str],
        clear: Callable[[], None],
    ) -> None:
        """`socket_name`: of the agent's socket, empty while it has none; `is_first`: it is node 0 now;
        `clear`: makes room for a line on the terminal."""
        self._socket_name, self._is_first, self._run_id = socket_name, is_first, run_id
        self._clear = clear

    @property
    def link(self) -> str:
        """The address with the token; empty while the page is not open. A secret."""
        lives = self._process is not None and self._process.poll() is None
        return f"{self._origin()}/?token={self._token}" if lives else ""

    def _origin(self) -> str:
        assert self._listener is not None or self._opened
        host = self._plan.host
        if host in ("0.0.0.0", "::"):
            host = os.uname().nodename
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _listen(self) -> None:
        import socket

        host, port = self._plan.host, self._plan.port
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise PhalanxError(f"--dashboard {where}: {error.strerror or error}") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Inherited by connections: one whose browser has vanished, or takes nothing, ends.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise PhalanxError(
                f"--dashboard {where}: cannot listen there: {error.strerror or error}; choose another address"
            ) from None
        self._listener = listener
        self._port = int(listener.getsockname()[1])

    # -- a part of the loop -------------------------------------------------------------------------

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        return []

    def deadline(self, phase: Phase) -> float | None:
        return None

    def look(self, phase: Phase, now: float) -> None:
        """Open the page once workers run and this node has rank 0: not in the way of their start."""
        if self._opened or phase != "RUNNING" or not self._is_first() or not self._socket_name():
            return
        self._opened = True
        try:
            if self._listener is None:
                self._listen()
            self._start()
        except (PhalanxError, OSError) as error:
            self._note(f"{error}; the job runs without a page")
        finally:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _start(self) -> None:
        import json
        import subprocess

        listener = self._listener
        assert listener is not None
        process = subprocess.Popen(
            python_command("phalanx.web.dashboard", str(listener.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env=without_secrets(),
            start_new_session=True,  # Ctrl-C is for the job, whose end the page still shows
        )
        self._process = process
        task = {
            "token": self._token,
            "socket": self._socket_name(),
            "host": self._plan.host,
            "agent": os.getpid(),
        }
        self._tell(json.dumps(task))
        self._introduce()

    def _tell(self, line: str) -> None:
        """A line to the process; a short one, which a pipe takes at once."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            fd = self._process.stdin.fileno()
            os.set_blocking(fd, False)
            os.write(fd, line.encode() + b"\n")
        except (OSError, ValueError):
            pass  # it is gone

    def _introduce(self) -> None:
        if self._plan.quiet:
            return
        self._clear()
        if sys.stderr is not None and sys.stderr.isatty():
            self._note(f"dashboard: {self.link}")
        else:
            self._note(
                f"dashboard at {self._origin()}; its link: phalanx status {self._run_id()[:12]} --link"
            )
        if not is_loopback(self._plan.host):
            self._note(
                "dashboard: plain HTTP beyond this machine; whoever can read the network sees its link"
            )

    # -- the end ------------------------------------------------------------------------------------

    def finish(self, outcome: str, code: int, why: str) -> None:
        """Tell viewers how the job ended."""
        if self._process is None:
            return
        import json

        self._tell(json.dumps({"outcome": outcome, "exit_code": code, "why": why[:_LONGEST_REPORT]}))

    def close(self) -> None:
        """End the page, and wait for its process; idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        process, self._process = self._process, None
        if process is None:
            return
        import subprocess

        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(PAGE_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def describe(dashboard: DashboardProcess | None) -> dict[str, Any]:
    """The answer to a client of the agent's socket that asks for the page."""
    link = dashboard.link if dashboard is not None else ""
    return {"link": link} if link else {"error": "this job has no page; start it with --dashboard"}
