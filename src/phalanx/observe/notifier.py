"""`--notify`: tells a command or a URL of failures, recoveries, hangs and the end of a job.

Each message is one JSON object, on the stdin of the command or as the body of a POST:

    {"event": "failure", "text": "train.py on a1: rank 1: RuntimeError: boom; restart 1 of 3", "time": …,
     "job": "train.py", "run_id": "…", "host": "a1", "round": 2, "restarts": 1, "reason": "…", …}

`text` is for people (it is what chat services show). Messages are sent in order by a thread that is started
with the first of them, three attempts each, and a queue that is full loses the newest. The job never waits,
but for its last message: the end of the launcher waits for at most ten seconds in all.

A URL or a command may hold a secret: neither is ever printed, and the variable is not handed to workers.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.core.record import Record
from phalanx.environment import without_secrets
from phalanx.log import warn
from phalanx.logs.json_lines import timestamp

if TYPE_CHECKING:
    import subprocess

_ATTEMPTS = 3
_PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt
_ANSWER = 5.0  # seconds for a server
_RUN = 15.0  # seconds for a command
_LAST = 10.0  # seconds that the end of the job waits
_QUEUE = 64
_NOT_WORTH_ANOTHER = frozenset(range(400, 500)) - {408, 425, 429}


class JobNames(Record):
    """What every message says about the job."""

    job: str
    run_id: str
    host: str


class Undelivered(Exception):
    """An attempt failed; `final`: another one would, too."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Notifier:
    """Sends messages from a thread of its own."""

    def __init__(self, target: str, names: JobNames) -> None:
        self._target = target
        self._names = names
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sending = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = 0
        self._told = False

    def send(self, event: str, text: str, **more: Any) -> None:
        """Queue a message; returns at once."""
        names = self._names
        message = {
            "event": event,
            "text": f"{names.job} on {names.host}: {text}",
            "time": timestamp(time.time()),
            **names.as_dict(),
            **more,
        }
        body = json.dumps(message, default=str).encode()
        with self._changed:
            if self._closed or len(self._queue) >= _QUEUE:
                self._failed += 1
                return
            self._queue.append(body)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="phalanx-notify", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float = _LAST) -> None:
        """Wait until everything is sent, but not for long; what is not, is counted in one line."""
        end = time.monotonic() + patience
        with self._changed:
            while (self._queue or self._sending) and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            self._closed = True
            left = self._failed + len(self._queue) + self._sending
            self._changed.notify_all()
            process = self._process
        if process is not None:
            _kill(process)
        if self._thread is not None:
            self._thread.join(1.0)
        if left:
            warn(f"--notify: {left} message{'s' * (left != 1)} could not be delivered")

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                body = self._queue.popleft()
                self._sending = True
            delivered = self._deliver(body)
            with self._changed:
                self._sending = False
                self._failed += not delivered and not self._closed
                self._changed.notify_all()

    def _deliver(self, body: bytes) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                if self._target.startswith(("http://", "https://")):
                    post(self._target, body)
                else:
                    self._run(body)
                return True
            except Undelivered as error:
                if not self._told and not self._closed:
                    self._told = True
                    warn(f"--notify: {error}")
                if error.final or attempt == _ATTEMPTS - 1:
                    return False
            with self._changed:
                if self._closed or self._changed.wait_for(lambda: self._closed, _PAUSES[attempt]):
                    return False
        return False

    def _run(self, body: bytes) -> None:
        import subprocess

        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._target],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=without_secrets(),
                start_new_session=True,  # a Ctrl-C is for the job
            )
        except OSError as error:
            raise Undelivered(f"the command cannot be started: {error.strerror}") from None
        with self._changed:
            self._process = process
            if self._closed:
                _kill(process)
        try:
            process.communicate(body, timeout=_RUN)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            raise Undelivered(f"the command did not end within {_RUN:g} s") from None
        except OSError:
            process.wait()
        finally:
            with self._changed:
                self._process = None
        if process.returncode:
            raise Undelivered(f"the command failed with exit code {process.returncode}")


def post(url: str, body: bytes) -> None:
    """Send a body to a URL; Undelivered says why that failed, without the URL."""
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A redirected POST would become a GET, and its body would be lost."""

        def redirect_request(self, *_args: Any) -> None:
            return None

    parts = urllib.parse.urlsplit(url)
    headers = {"Content-Type": "application/json", "User-Agent": "phalanx"}
    if parts.username is not None:
        import base64

        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    request = urllib.request.Request(parts.geturl(), data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=_ANSWER) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        final = error.code in _NOT_WORTH_ANOTHER or 300 <= error.code < 400
        raise Undelivered(f"the server answered with {error.code}", final) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # not its text, which may quote the URL
        why = getattr(cause, "strerror", None) or type(cause).__name__
        raise Undelivered(f"the server cannot be reached: {why}") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    import os
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
