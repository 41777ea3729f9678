"""Every message between the agent, the keeper, the zygote and the workers, and how it travels.

    agent → zygote     SpawnGroup, StopGroup, RecallGroup, SignalWorkers, StandbyPlan, KeptTerms
    zygote → agent     WorkersForked, WorkersStarted, SpawnRefused, Exit, GroupStopping, GroupStopped,
                       WorkersFenced, WorkerReenters, WorkerParked, WorkerUnfit, StandbysParked,
                       StandbyRemark, PreloadDone, KeptAnswer
    zygote → keeper    ZygoteKept, ZygoteAdopted, LeaseChanged
    worker → zygote    CanReenter, Parked, Unfit
    zygote → worker    Recall, Handover (to a standby, too)
    standby → zygote   StandbyReady, StandbyFailed
    next launch → kept zygote, and back
                       Adopt → AdoptAnswer, TakeOver → TakenOver, Describe → KeptDescription, EndKept

Both ends run the same files and nothing else can reach the sockets, so marshal is safe here (it is never used
on bytes from a network) and costs no import. A record travels as a tuple that begins with an ellipsis and its
name; lists may contain records.
"""

from __future__ import annotations

import marshal

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Place = tuple[str, int, int]  # name, descriptor, number in the worker (-1: any, for forks)
    Program = tuple[str, str, list[str]]  # mode, target, arguments
    OwnFile = tuple[str, int, int]  # path, time in nanoseconds, size

WARM_UP_LIMIT = 60.0  # seconds; opening eight devices takes about ten


# -- parts of messages ------------------------------------------------------------------------------


class WorkerLaunch(Record, frozen=False):
    """What one worker runs. `argv` empty: a function or a Python program, run in a fork of the zygote."""

    rank: int
    argv: Sequence[str] = ()
    path: str = ""
    fds: Sequence[Place] = ()  # as it travels: places in the message's list of descriptors
    name: str = ""  # for a function: the name of its process
    options: str = ""  # what bootstrap.prepare is to do
    program: Program | None = None
    env: Mapping[str, str] = {}
    stdin: str = ""  # a path; empty: as in the agent. The same for the other two:
    stdout: str = ""
    stderr: str = ""
    cpus: Sequence[int] = ()
    reentry: str = ""  # what a worker that can re-enter is told of its round; empty: it cannot


class StandbyRank(Record, frozen=False):
    """What is known beforehand of the worker that a standby becomes."""

    program: Program | None = None
    env: Mapping[str, str] = {}  # what does not change from round to round
    options: str = ""
    cpus: Sequence[int] = ()
    runs_script: bool = False


# -- agent → zygote ---------------------------------------------------------------------------------


class SpawnGroup(Record):
    """Start these workers, all or none. Descriptors: those of `std`, `lease` and the workers' `fds`."""

    group: int  # a number: late answers must not count for the next group
    workers: list[WorkerLaunch]
    env: dict[str, str]
    cwd: str
    std: list[int]
    ignored: list[int]  # signals
    lease: int  # a timer; -1: none
    at_failure: tuple[int, float] | None  # signal and grace for the others if one fails


class StopGroup(Record):
    """`signal` now, SIGKILL after `grace`."""

    group: int
    signal: int
    grace: float


class RecallGroup(Record):
    """A stop, but workers that can re-enter have `timeout` seconds to park; the culprits have none."""

    group: int
    signal: int
    grace: float
    timeout: float
    cause: str
    culprits: list[int]


class SignalWorkers(Record):
    """Pass a signal on, to the workers `alone` or to their process groups."""

    signal: int
    ranks: list[int]
    alone: bool


class StandbyPlan(Record):
    """Keep one standby for each of these ranks."""

    ranks: list[StandbyRank]
    warm_up: str  # module:function
    limit: float  # seconds for the warm-up
    cwd: str
    env: dict[str, str]  # of the agent
    ignored: list[int]  # signals that it ignores


class KeptTerms(Record):
    """The job is over: wait for the next launch of its script."""

    name: str  # of the socket
    key: str
    title: str  # the script, for people
    idle: float  # seconds
    marks: list[str]  # what the script does before its imports (import_cache.py)
    names: list[str]  # preloaded modules


# -- zygote → agent ---------------------------------------------------------------------------------


class WorkersForked(Record):
    """Rank → pid, before any of them runs. Descriptors: pidfds of the zygote and of all workers, or none."""

    pids: dict[int, int]


class WorkersStarted(Record):
    """The whole group runs: rank → pid."""

    pids: dict[int, int]


class SpawnRefused(Record):
    """Nothing of the group was started."""

    rank: int | None
    why: str


class Exit(Record):
    """How a worker ended. `signalled_at` is 0.0 unless the zygote had signalled it before."""

    rank: int
    pid: int
    code: int
    at: float
    signalled_at: float


class GroupStopping(Record):
    """A stop has begun."""

    group: int


class GroupStopped(Record):
    """Nothing of the group is left, but for the processes described here, which outlived SIGKILL."""

    group: int
    unkillable: list[str]


class WorkersFenced(Record):
    """The zygote kills the workers, because their lease was not renewed in time."""

    group: int


class WorkerReenters(Record):
    """A worker can be recalled from now on, or cannot any more."""

    group: int
    rank: int
    can: bool


class WorkerParked(Record):
    """A worker that was recalled waits for its next place."""

    group: int
    rank: int


class WorkerUnfit(Record):
    """A worker that was recalled does not park."""

    group: int
    rank: int
    why: str


class StandbysParked(Record):
    """The standbys that wait."""

    pids: list[int]


class StandbyRemark(Record):
    """Why there are none, for the user."""

    text: str


class PreloadDone(Record):
    """The imports are over, or given up."""


class KeptAnswer(Record):
    """To KeptTerms: whether the zygote stays."""

    stays: bool


# -- zygote → keeper --------------------------------------------------------------------------------


class ZygoteKept(Record):
    """It has no agent from now on."""


class ZygoteAdopted(Record):
    """It has another one. Descriptors: the agent's pidfd and a tether (launch_watch.py)."""

    nice: int


class LeaseChanged(Record):
    """The timer in its descriptors counts from now on; without one: none does."""


# -- workers and standbys ---------------------------------------------------------------------------


class CanReenter(Record):
    """This worker can be recalled from now on, or cannot any more."""

    can: bool


class Parked(Record):
    """This worker has unwound."""


class Unfit(Record):
    """This worker does not park."""

    why: str


class Recall(Record):
    """Unwind and park."""

    cause: str


class Handover(Record):
    """The rank of a standby or a parked worker. Descriptors: the group's, then the gate and a status pipe."""

    group: SpawnGroup  # without its workers
    worker: WorkerLaunch


class StandbyReady(Record):
    """This standby waits, having loaded these files of the user's."""

    files: list[OwnFile]


class StandbyFailed(Record):
    """The warm-up of this standby failed."""

    why: str


# -- the next launch and a kept zygote --------------------------------------------------------------


class Adopt(Record):
    """May this launch use the zygote?"""

    key: str
    marks: list[str]


class AdoptAnswer(Record):
    """To Adopt."""

    yes: bool


class TakeOver(Record):
    """Descriptors: the standard streams, the agent's pidfd and a tether."""

    nice: int


class TakenOver(Record):
    """Descriptor: the keeper's pidfd."""

    keeper: int  # its pid
    names: list[str]  # preloaded modules


class Describe(Record):
    """Asks for KeptDescription."""


class KeptDescription(Record):
    """For people."""

    script: str
    pids: list[int]  # keeper, zygote
    since: float
    left: float
    modules: int | None  # None: it does not answer


class EndKept(Record):
    """The kept zygote ends; the answer is the end of the connection."""


# -- on the way -------------------------------------------------------------------------------------

_KINDS = {name: kind for name, kind in globals().items() if isinstance(kind, type)}


def dump(message: Record) -> bytes:
    return marshal.dumps(_plain(message))


def load(data: bytes) -> Record:
    """The message of these bytes."""
    message: Record = _typed(marshal.loads(data))
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return (..., type(value).__name__, *map(_plain, value.as_dict().values()))
    return list(map(_plain, value)) if type(value) is list else value


def _typed(value: Any) -> Any:
    if type(value) is tuple and value[:1] == (...,):
        return _KINDS[value[1]](*map(_typed, value[2:]))
    return list(map(_typed, value)) if type(value) is list else value
