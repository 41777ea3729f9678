"""Progress for the status of a Kubeflow TrainJob, where its controller asks for it.

With its feature gate TrainJobStatus, Kubeflow Trainer gives every pod a URL, a CA file and a token file, and
takes a POST with `{"trainerStatus": {…}}` (the API type UpdateTrainJobStatusRequest). Each report replaces
the one before, so only the agent of node 0 sends any, and only once its workers have sent a heartbeat with a
step: a script that reports by itself, without Phalanx's heartbeats, is not overwritten.

A thread sends them, seldom and only if something has changed: the API server is behind it. The job never
waits for it but at its end, and not for long. The token is read each time, because Kubernetes replaces
it, and is never shown.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.core.record import Record
from phalanx.job.environment import StatusTarget
from phalanx.job.time_budgets import TRAIN_END, TRAIN_SAMPLE
from phalanx.log import warn
from phalanx.observe.json_lines import timestamp
from phalanx.observe.outbox import Undelivered

_FIRST, _EVERY = 5.0, 30.0  # seconds


class TrainProgress(Record):
    """The job at one moment, as node 0 sees it; `step`: the smallest of its ranks."""

    at: float
    step: int
    restarts: int
    nodes: int
    workers: int
    goodput: float


def report(now: TrainProgress, before: TrainProgress | None, done: bool) -> dict[str, Any]:
    """The body of a request. How much is left is not known before all of it is done."""
    found = {"step": str(now.step)}
    if before is not None and now.at > before.at and now.step > before.step:
        found["steps_per_second"] = f"{(now.step - before.step) / (now.at - before.at):.4g}"
    found |= {"restarts": str(now.restarts), "nodes": str(now.nodes), "workers": str(now.workers)}
    found["goodput"] = f"{now.goodput:.3f}"
    status: dict[str, Any] = {"metrics": [{"name": name, "value": value} for name, value in found.items()]}
    if done:
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    status["lastUpdatedTime"] = timestamp(now.at)
    return {"trainerStatus": status}


class TrainStatus:
    """`sample` runs in the owner's thread, which `post` reaches; None: nothing to report (yet)."""

    def __init__(
        self,
        target: StatusTarget,
        sample: Callable[[], TrainProgress | None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._target, self._sample, self._post = target, sample, post
        self._before: TrainProgress | None = None  # what was sent last
        self._told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="phalanx-train-status", daemon=True)
        self._thread.start()

    def close(self, succeeded: bool) -> None:
        """Send the last report, if there was any step; waits for it, but not for long."""
        self._closed.set()
        self._thread.join(TRAIN_END)
        if self._thread.is_alive():
            return
        last = self._sample() or self._before  # the owner's thread has nothing else to do now
        if last is not None:
            sender = threading.Thread(
                target=self._send, args=(last, succeeded), name="phalanx-train-status", daemon=True
            )
            sender.start()
            sender.join(TRAIN_END)

    def _main(self) -> None:
        pause = _FIRST
        while not self._closed.wait(pause):
            now = self._ask()
            if now is not None and (self._before is None or now.step != self._before.step):
                self._send(now, False)
            pause = _EVERY if self._before is not None else _FIRST

    def _ask(self) -> TrainProgress | None:
        found: list[TrainProgress | None] = []
        answered = threading.Event()

        def sample() -> None:
            found.append(self._sample())
            answered.set()

        self._post(sample)
        until = time.monotonic() + TRAIN_SAMPLE
        while not answered.wait(0.2) and not self._closed.is_set() and time.monotonic() < until:
            pass
        return found[0] if found else None

    def _send(self, now: TrainProgress, done: bool) -> None:
        from phalanx.observe.notifier import post

        body = json.dumps(report(now, self._before, done)).encode()
        try:
            with open(self._target.token_file, encoding="ascii") as file:
                token = file.read(1 << 16).strip()
            post(self._target.url, body, token=token, ca_file=self._target.ca_file)
            self._before = now
        except (Undelivered, OSError, UnicodeError) as error:
            if not self._told:
                self._told = True
                why = getattr(error, "strerror", None) or error
                warn(f"KUBEFLOW_TRAINER_STATUS_URL: {why}; the TrainJob does not show the job's progress")
