"""A standby that runs the script up to `worker.wait_for_rank()`, and waits there for its rank.

The script finds the interpreter, its arguments, its directory and its environment as a worker does, except
for what comes with the hand-over: RANK, WORLD_SIZE and the other variables of a round, the standard input,
the log, the heartbeat board and the error file. Variables that the script has changed before it waits stay
as it set them, as in a worker.

The bootstrap offers an object of this module to the script under the name in `sys.modules` that
`wait_for_rank` looks for: the script may use another copy of phalanx than the launcher.
"""

from __future__ import annotations

import os
import sys

from phalanx.helpers.fork_setup import WorkerSeat
from phalanx.helpers.preload.import_recorder import homes
from phalanx.helpers.standby import loaded_files, receive_handover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.helpers.channel import Channel
    from phalanx.helpers.messages import Handover, StandbyPlan

NAME = "_phalanx_standby"  # in sys.modules; repeated in worker.py


class ScriptStandby:
    """The standby's own side of the wait."""

    def __init__(self, channel: Channel, plan: StandbyPlan, rank: int) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._known = plan.ranks[rank]
        self._script = ""
        mode, target, _ = self._known.program or ("", "", [])
        if mode == "script" and not os.path.isdir(target):
            self._script = os.path.join(plan.cwd, target)
        self._variables: dict[str, str] = {}  # as the script found them
        self.nice = 0  # of a worker
        self.connect: Callable[[str, dict[str, int]], None] = lambda _options, _places: None
        self.set_title: Callable[[], object] = lambda: None

    def offer(self) -> None:
        """The script is about to run: let it find this object."""
        self._variables = dict(os.environ)
        module: Any = type(sys)(NAME)
        module.wait = self.wait
        module.pid = self._pid
        sys.modules[NAME] = module

    def wait(self) -> None:
        """Wait for the hand-over and become the worker; called once, by the script."""
        sys.modules.pop(NAME, None)
        try:
            order, fds = receive_handover(self._channel, loaded_files(homes(), self._script))
        except (EOFError, OSError):
            os._exit(1)  # the zygote is gone, or this standby is not needed
        seat = WorkerSeat(order, fds)
        try:
            self._become(order, seat)
        except OSError as error:
            seat.fail(error)

    def _become(self, order: Handover, seat: WorkerSeat) -> None:
        seat.open(replays=True)
        if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
            except OSError:
                pass  # not permitted; `lower_priority` has tried it
        seat.wait_at_gate()
        seat.settle(set())
        self._set_variables({**order.group.env, **order.worker.env})
        self.connect(order.worker.options, seat.places)
        self.set_title()

    def _set_variables(self, new: dict[str, str]) -> None:
        """Those of a worker, with the script's own changes; nothing else can change a variable of a round."""
        now, before = dict(os.environ), self._variables
        for name in now.keys() | before.keys() | new.keys():
            if (name in before or name not in new) and now.get(name) != before.get(name):
                continue  # the script's own
            value = new.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif now.get(name) != value:
                os.environ[name] = value
