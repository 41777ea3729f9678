"""What runs beside an agent on request: the health port, the timers' watchdog, the check of a node.

Each is started before the first round and stopped after the last. None touches the group: they post to the
owner loop's queue.
"""

from __future__ import annotations

import os

from phalanx.errors import NodeUnfit, PhalanxError
from phalanx.job import environment
from phalanx.job.units import address

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.supervision.timers.pipe_watchdog import PipeWatchdog
    from phalanx.agent.supervision.timers.timer_pipe import FileTimerRequest
    from phalanx.core.diagnosis.fitness import NodeVerdict
    from phalanx.web.health import HealthServer
    from phalanx.web.metrics import Page


_CHECK_PATIENCE = 60.0
_OWN_PATIENCE = 180.0  # each of its checks has a limit of its own
_LAST_CHANCE = 5.0
_LAST_WORDS = 300


class Services:
    """The services of one run."""

    def __init__(self, health: str | None = None) -> None:
        self.health_address = environment.health_port() if health is None else health
        self.health: HealthServer | None = None
        self.timers: PipeWatchdog | None = None
        self.environment: dict[str, str] = {}
        self.pages: dict[str, Callable[[str], Page]] = {}  # served beside the health endpoints
        self._given: Any = None  # a server that the caller brought
        self._own_folder = ""
        self._probe: tuple[Callable[[threading.Event], None], Callable[[], bool]] | None = None

    def open(
        self,
        run_id: str,
        knock: Callable[[threading.Event], None],
        ready: Callable[[], bool],
        given: Any = None,
        leave: frozenset[str] = frozenset(),
    ) -> None:
        """Start what is asked for, except what to `leave` for later; on an error nothing is left running."""
        self._probe = knock, ready
        try:
            if "timers" not in leave:
                self.start_timers(run_id)
            if "health" not in leave:
                self.start_health()
            if given is not None:
                given.start()
                self._given = given
        except BaseException:
            self.close()
            raise

    def start_timers(
        self, run_id: str, log_event: Callable[[str, FileTimerRequest | None], None] | None = None
    ) -> None:
        """Start the watchdog of the timers, if it is asked for and does not run."""
        path = environment.timer_file()
        if path is None or self.timers is not None:
            return
        from phalanx.agent.supervision.timers.pipe_watchdog import PipeWatchdog
        from phalanx.agent.supervision.timers.timer_pipe import private_path

        if not path:
            path = private_path()
            self._own_folder = os.path.dirname(path)
        server = PipeWatchdog(path, run_id, log_event=log_event)
        server.start()
        self.timers = server
        self.environment[environment.TIMER_FILE] = path

    def start_health(self) -> None:
        """Start the health endpoint, if it is asked for and does not run.

        A port of the environment that is in use is left alone, with a warning: several agents of one machine
        have the same environment."""
        if not self.health_address or self.health is not None or self._probe is None:
            return
        from phalanx.web.health import HealthServer, LoopProbe

        knock, ready = self._probe
        try:
            host, port = address(self.health_address)
        except ValueError as error:
            raise ValueError(f"{environment.HEALTH_PORT}={self.health_address}: {error}") from None
        watchdog_progress = self.timers.last_progress if self.timers is not None else None
        probe = LoopProbe(knock, watchdog_progress)
        server = HealthServer(host, port, probe.live, ready, self.pages)
        try:
            server.start()
        except PhalanxError as error:
            if self.health_address != environment.health_port():
                raise
            from phalanx.log import warn

            warn(f"{error}; this agent runs without health endpoints")
            self.health_address = ""
        else:
            self.health = server

    def close(self) -> None:
        """Stop everything; idempotent."""
        given, self._given = self._given, None
        if given is not None:
            given.stop()
        if self.health is not None:
            self.health.stop()
        timers, self.timers = self.timers, None
        if timers is not None:
            timers.stop()
        folder, self._own_folder = self._own_folder, ""
        if folder:
            try:
                os.rmdir(folder)
            except OSError:
                pass  # a worker made something in it


class NodeCheck:
    """What decides whether this node may join: Phalanx's own check, once, and a command of the user's."""

    def __init__(self, command: str = "", own: Sequence[str] = (), patience: float = _CHECK_PATIENCE) -> None:
        """`own`: the options of `phalanx check`; none: without it."""
        import threading

        self.command = command
        self._own = tuple(own)
        self._patience = patience
        self._process: Any = None
        self._closed = False
        self._lock = threading.Lock()  # between a start of a process and the end of it all

    def begin(
        self, then: Callable[[NodeUnfit | None], None], say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Run it in a thread, because it may take long; `then` and `say` are called there."""
        import threading

        def check() -> None:
            then(self.run_own(say) or self.run())

        threading.Thread(target=check, name="phalanx-node-check", daemon=True).start()

    def run_own(self, say: Callable[[str], None]) -> NodeUnfit | None:
        """`phalanx check`, before the first round only: between rounds a restart waits for it."""
        from phalanx.core.diagnosis.fitness import FIT, UNFIT, UNKNOWN, NodeVerdict
        from phalanx.python_command import python_command

        own, self._own = self._own, ()
        if not own:
            return None
        host = os.uname().nodename
        verdict = NodeVerdict(host, UNKNOWN, f"the check did not end within {_OWN_PATIENCE:g} s")
        try:
            ended = self._execute(python_command("phalanx", "check", *own), _OWN_PATIENCE)
            if ended is not None:
                verdict = read_verdict(host, *ended)
        except OSError as error:
            verdict = verdict.replace(reason=f"the check could not be run: {error.strerror}")
        if verdict.fitness == UNFIT:
            line = f"{host} is unfit ({verdict.reason}) and stays out of the job; phalanx check shows more"
            return NodeUnfit(line, verdict)
        if verdict.fitness != FIT and not self._closed:
            say(f"check of {host}: {verdict.fitness} ({verdict.reason})")
        return None

    def run(self) -> NodeUnfit | None:
        """The user's command: None when the node is fit, else what is wrong with it."""
        if not self.command:
            return None
        try:
            ended = self._execute(["/bin/sh", "-c", self.command], self._patience)
        except OSError as error:
            return self._unfit(f"could not be run: {error.strerror}")
        if ended is None:
            return self._unfit(f"did not end within {self._patience:g} s")
        code, output = ended
        if code == 0:
            return None
        lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
        said = f": {lines[-1][:_LAST_WORDS]}" if lines else ""
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        return self._unfit(f"failed ({how}){said}")

    def _execute(self, argv: list[str], patience: float) -> tuple[int, bytes] | None:
        """Exit code and output of a process; None when it did not end in time. OSError: no such program."""
        import subprocess

        with self._lock:
            if self._closed:
                return 0, b""
            process: Any = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._process = process
        try:
            output, _ = process.communicate(timeout=patience)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            self._kill()
            # Not for the end of its output, which may be held by something in another session.
            try:
                process.wait(_LAST_CHANCE)
            except subprocess.TimeoutExpired:
                pass  # in uninterruptible sleep: it is left to the kernel
            process.stdout.close()
            return None
        finally:
            self._process = None

    def _unfit(self, how: str) -> NodeUnfit:
        from phalanx.core.diagnosis.fitness import UNFIT, NodeVerdict

        host, what = os.uname().nodename, f"health check {self.command!r} {how}"
        return NodeUnfit(f"{what}; {host} stays out of the job", NodeVerdict(host, UNFIT, what))

    def _kill(self) -> None:
        import signal

        process = self._process
        if process is not None and process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End a check that still runs; its thread reaps it."""
        with self._lock:
            self._closed = True
            self._kill()


def read_verdict(host: str, code: int, output: bytes) -> NodeVerdict:
    """What `phalanx check --json` has printed."""
    import json

    from phalanx.core.diagnosis.fitness import EXIT_CODES, FIT, UNKNOWN, NodeVerdict

    text = output.decode("utf-8", "replace").strip()
    try:
        told = json.loads(text)
        verdict = NodeVerdict(host, str(told["fitness"]), str(told["reason"]))
        if EXIT_CODES[verdict.fitness] == code:
            return verdict
    except (ValueError, TypeError, KeyError):
        pass
    if not text and code == 0:
        return NodeVerdict(host, FIT)  # the agent is about to end, and so is the check
    last = text.splitlines()[-1][:_LAST_WORDS] if text else "no output"
    return NodeVerdict(host, UNKNOWN, f"the check failed (exit code {code}): {last}")
