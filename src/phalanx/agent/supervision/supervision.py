"""What an agent has beside its workers: boards, services, preemption, and a hang detector for every start.

`Supervision()` watches nothing and starts no service: it stands where none is asked for.
"""

from __future__ import annotations

import select
import time

from phalanx.agent.supervision.agent_services import NodeCheck, Services
from phalanx.agent.supervision.hang_detector import HangDetector
from phalanx.agent.supervision.incident_log import IncidentLog
from phalanx.agent.supervision.preemption import Preemption, StepAgreement
from phalanx.agent.supervision.trace_sockets import TraceSockets
from phalanx.core.group.events import RoundFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.spec import WorkerGroup
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.diagnosis.progress import WatchPolicy
    from phalanx.core.group.events import Event
    from phalanx.core.group.group import Phase
    from phalanx.core.ledger.goodput import RankProgress
    from phalanx.errors import NodeUnfit
    from phalanx.worker.board import Boards, BoardSnapshot


class Supervision:
    """What one agent watches, over all its starts."""

    def __init__(
        self,
        policy: WatchPolicy | None = None,
        *,
        preempt_signal: int = 0,
        health: str | None = None,
        health_check: str = "",
        replace_slow: bool = False,
        own_check: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.preemption = Preemption(preempt_signal)
        self.services = Services(health)
        self.node_check = NodeCheck(health_check, own_check) if health_check or own_check else None
        self.unfit: NodeUnfit | None = None  # why this node stays out
        self.incidents = IncidentLog()
        self.trace_sockets = TraceSockets()
        self.detector: HangDetector | None = None  # while workers run, and until the next ones do
        self.on_unfit: Callable[[str], None] = lambda _why: None
        self.replace_slow = replace_slow
        self.slow_host: Callable[[int, str, str], None] = lambda _round, _host, _why: None
        """Called with a host of a round that is to be replaced by a spare, and why; empty: no longer."""
        self._post: Callable[[Any], None] = lambda _event: None
        self._boards: Boards | None = None
        self._round: tuple[WorkerGroup, int] | None = None  # of the last start
        self._agreement: StepAgreement | None = None  # on the step at which preempted workers save
        self.final: list[BoardSnapshot] = []  # the boards when all was over

    # -- over the whole run -------------------------------------------------------------------------

    def open(
        self,
        *,
        run_id: str,
        post: Callable[[Any], None],
        note: Callable[[str], None],
        phase: Callable[[], str],
        health_check_server: Any = None,
        leave: frozenset[str] = frozenset(),
    ) -> None:
        """Start the services, except those to `leave`; `post` queues what the owner thread does."""
        self._post, self.incidents.note = post, note

        def knock(answer: threading.Event) -> None:
            post(answer.set)

        self.services.open(
            run_id,
            knock,
            lambda: phase() in ("RUNNING", "BARRIER"),
            health_check_server,
            leave,
        )

    def close(self) -> None:
        """Stop the services and give the boards back."""
        if self.node_check is not None:
            self.node_check.close()
        self._end_detector()
        self._end_agreement()
        if self._boards is not None:
            self.final = self.snapshots()
            self._boards.close()
            self._boards = None
        self.trace_sockets.close()
        self.services.close()

    def job_failed(self) -> None:
        """The job is about to be over for this node: the last chance to read what the others found."""
        if self.detector is not None:
            self.detector.wait_for_verdict()

    def join(self, go: Callable[[], None]) -> None:
        """Enter the rendezvous with `go`, in the owner's thread, once this node is found fit."""
        if self.node_check is None:
            go()
            return

        def then(unfit: NodeUnfit | None) -> None:
            self._post(go if unfit is None else lambda: self._stay_out(unfit))

        self.node_check.begin(then, lambda line: self._post(lambda: self.incidents.note(line)))

    def _stay_out(self, unfit: NodeUnfit) -> None:
        self.unfit = unfit
        self.incidents.note(str(unfit))
        self.on_unfit(str(unfit))
        # Graceful: the others go on without this node.
        self._post(RoundFailed("graceful", str(unfit)))

    # -- one start ----------------------------------------------------------------------------------

    def begun(self) -> float | None:
        """When all workers of the last start had reached their first line; None where that is not known."""
        return self._boards.begun() if self._boards is not None else None

    def step_of(self, rank: int) -> int | None:
        """The last step that this worker reported."""
        return None if self._boards is None else self._boards.read(rank).step

    @property
    def current_boards(self) -> Boards | None:
        """Those of the last start."""
        return self._boards

    def snapshots(self) -> list[BoardSnapshot]:
        """The boards of the last start now."""
        boards = self._boards
        return [] if boards is None else [boards.read(rank) for rank in range(boards.count)]

    def quiet_since(self, now: float) -> float | None:
        """When any worker last wrote output, where that is watched (--silence-timeout)."""
        return None if self.detector is None else self.detector.quiet_since(now)

    def progress(self) -> list[RankProgress]:
        """What the goodput ledger wants to know of every worker of the last start; empty: no boards."""
        boards = self._boards
        return [] if boards is None else [boards.progress(rank) for rank in range(boards.count)]

    def boards(self, count: int, marks: Sequence[int | None] = ()) -> Boards:
        """New boards for a start, with the steps reached before; those of the last one are given back."""
        from phalanx.worker.board import Boards

        self._end_agreement()
        if self._boards is not None:
            self._boards.close()
        self._boards = Boards(count, self.preemption.signal)
        for rank, mark in enumerate(marks):
            if mark is not None and mark >= 0:
                self._boards.set_mark(rank, mark)
        self.preemption.over()
        return self._boards

    def started(self, context: PContext, group: WorkerGroup, now: float, number: int, host: str) -> None:
        """These workers run now, in this round; `host` is this node's name among the others."""
        self._end_detector()
        assert self._boards is not None, "boards come before workers"
        self._round = group, number
        self.detector = HangDetector(
            context,
            self._boards,
            group,
            self.policy,
            self.incidents,
            self._post,
            trace_sockets=self.trace_sockets,
            on_slow=(lambda name, why: self.slow_host(number, name, why)) if self.replace_slow else None,
            number=number,
            host=host,
            now=now,
        )

    def finished(self, now: float) -> None:
        """All workers of this node have ended well."""
        if self.detector is not None:
            self.detector.finished(now)

    def _end_detector(self) -> None:
        if self.detector is not None:
            self.detector.close()
            self.detector = None

    # -- the loop's view ----------------------------------------------------------------------------

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        """The workers' boards, while workers run."""
        if phase != "RUNNING" or self._boards is None or self.detector is None:
            return []
        return [(fd, select.POLLIN) for fd in self.detector.fds()]

    def deadline(self, phase: Phase) -> float | None:
        """When progress must be judged next."""
        if phase != "RUNNING" or self.detector is None:
            return None
        now = time.monotonic()
        left = self.detector.limit(None, now)
        return None if left is None else now + left

    def look(self, phase: Phase, now: float) -> Event | None:
        """Whether something hangs."""
        return self.detector.look(now) if phase == "RUNNING" and self.detector is not None else None

    def report(self, summary: str = "") -> str:
        """The last hang in full, if it was this one; empty when there was none."""
        lines = self.incidents.last_hang
        return "\n".join(lines) if lines and summary in lines[0] else ""

    # -- stopping -----------------------------------------------------------------------------------

    def stop(self, context: PContext, sig: int, grace: float) -> None:
        """Stop the workers; when it is for a preemption, let them checkpoint and leave by themselves."""
        if self._boards is not None and self.preemption.announced_by(sig):
            self.preemption.stop(context, self._boards, grace, self.incidents.note, self._agree)
        else:
            context.ask_stop(sig, grace)

    def _agree(self) -> None:
        if self._boards is not None and self._round is not None:
            group, number = self._round
            self._agreement = StepAgreement(self._boards, group, number, self._post, self.incidents.note)

    def _end_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def remind(self, context: PContext) -> None:
        """A stop takes long: a worker may have missed that it is a preemption."""
        if self._boards is not None:
            self.preemption.remind(context, self._boards)
