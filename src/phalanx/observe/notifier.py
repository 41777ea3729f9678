"""`--notify`: tells a command or a URL of failures, recoveries, hangs and the end of a job.

Each message is one JSON object, on the stdin of the command or as the body of a POST:

    {"event": "failure", "text": "train.py on a1: rank 1: RuntimeError: boom; restart 1 of 3", "time": …,
     "job": "train.py", "run_id": "…", "host": "a1", "round": 2, "restarts": 1, "reason": "…", …}

`text` is for people (it is what chat services show).

A URL or a command may hold a secret: neither is ever printed, and the variable is not handed to workers.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from phalanx.core.record import Record
from phalanx.job.time_budgets import NOTIFIED
from phalanx.observe.json_lines import timestamp
from phalanx.observe.outbox import Outbox, Undelivered
from phalanx.observe.stream import HangWarned, IncidentChanged, WorkersRunning

if TYPE_CHECKING:
    from phalanx.core.ledger.incidents import Incident
    from phalanx.observe.stream import Happened

_NOT_WORTH_ANOTHER = frozenset(range(400, 500)) - {408, 425, 429}
_TOLD = {"failure": "failure", "start": "failure", "uninterruptible": "failure", "hang": "hang"}
"""The incidents that are told of, by trigger: those of this node, and nothing that was meant to happen."""


class JobNames(Record):
    """What every message says about the job."""

    job: str
    run_id: str
    host: str


class Notifier(Outbox):
    """Makes the messages, and sends them to a command or a URL."""

    def __init__(self, target: str, names: JobNames) -> None:
        super().__init__("--notify", "message")
        self._target = target
        self._names = names
        self._recovers = False  # from an incident that was told of

    def take(self, happened: Happened) -> None:
        match happened:
            case IncidentChanged():
                self._incident(happened.incident)
            case HangWarned():
                self.send("hang", happened.summary, reason=happened.summary)
            case WorkersRunning() if self._recovers:
                self._recovers = False
                self.send("recovery", "all workers run again", restarts=happened.attempt)

    def _incident(self, incident: Incident) -> None:
        event = _TOLD.get(incident.trigger)
        if event is None or incident.over:
            return
        self._recovers = True
        self.send(
            event,
            incident.reason,
            reason=incident.reason,
            rank=incident.rank,
            exit_code=incident.exit_code,
            round=incident.round,
            restarts=incident.attempt,
        )

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
        self.put(json.dumps(message, default=str).encode())

    def deliver(self, body: bytes) -> None:
        if self._target.startswith(("http://", "https://")):
            post(self._target, body)
            return
        code = self.run(["/bin/sh", "-c", self._target], body)
        if code:
            raise Undelivered(f"the command failed with exit code {code}")


def post(url: str, body: bytes, token: str = "", ca_file: str = "") -> None:
    """Send a body to a URL; Undelivered says why that failed, without the URL.

    `token`: to be shown there; `ca_file`: who vouches for the server, instead of the system's own."""
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
    if token:
        headers["Authorization"] = f"Bearer {token}"
    handlers: list[Any] = [NoRedirect]
    try:
        if ca_file:
            import ssl

            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
        request = urllib.request.Request(parts.geturl(), data=body, headers=headers, method="POST")
        with urllib.request.build_opener(*handlers).open(request, timeout=NOTIFIED) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        final = error.code in _NOT_WORTH_ANOTHER or 300 <= error.code < 400
        raise Undelivered(f"the server answered with {error.code}", final) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # not its text, which may quote the URL
        why = getattr(cause, "strerror", None) or type(cause).__name__
        raise Undelivered(f"the server cannot be reached: {why}") from None
