"""How the agents of a job ended, in files: for whatever started them and has only one exit code of all.

`PHALANX_OUTCOMES` names a directory that all of them can write to. Each agent leaves one small file there,
also one that refuses its command line; an agent that was killed leaves none.
"""

from __future__ import annotations

import os

from phalanx.core.exit_codes import (
    DO_NOT_RETRY,
    FAILURE,
    HANG,
    INFRASTRUCTURE,
    NO_MEETING,
    SIGNALED,
    SUCCESS,
    UNFIT_NODE,
    USAGE,
)
from phalanx.core.record import Record
from phalanx.trusted_files import open_trusted, write_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST = 1 << 16


class AgentOutcome(Record):
    """The end of one agent: the word of core.group.events.Outcome, or empty, and its exit code.

    `quarantined`: the hosts that the job kept out when it ended here."""

    node: str
    outcome: str
    code: int
    reason: str = ""
    quarantined: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether this agent knows that the whole job has succeeded."""
        return self.outcome == "SUCCEEDED" and self.code == 0

    @property
    def refused(self) -> bool:
        """Whether this agent never joined: its command line is wrong, at least on its host."""
        return not self.outcome and self.code == USAGE

    @property
    def ends_job(self) -> bool:
        """Whether the whole job is over; otherwise this node alone has left, and the others wait for it."""
        own_failure = self.outcome == "FAILED" and self.code not in (NO_MEETING, UNFIT_NODE)
        return own_failure or self.outcome in ("SUCCEEDED", "CLOSED")


def job_code(outcomes: Sequence[AgentOutcome], otherwise: int, preempt_signal: int) -> int:
    """One code for the job: success, then the program's own failure, then what kept it from ending.

    `otherwise`: where no agent has one.
    """
    if any(one.succeeded for one in outcomes):
        return SUCCESS
    codes = [one.code for one in outcomes if one.code]
    if not codes:
        return otherwise or (FAILURE if outcomes else SUCCESS)
    if DO_NOT_RETRY in codes:
        return DO_NOT_RETRY
    preempted = SIGNALED + preempt_signal
    own = [code for code in codes if code not in INFRASTRUCTURE and code < SIGNALED]
    # A worker that was killed is the program's own failure too; a launcher that was signalled is not.
    for wanted in (*own, HANG, preempted, NO_MEETING, UNFIT_NODE):
        if wanted in codes:
            return wanted
    return max(codes)


def write_outcome(directory: str, outcome: AgentOutcome, key: str) -> None:
    """Leave a file; a full disk must not cost the exit code. `key`: unique among the agents."""
    import json

    data = outcome.as_dict()
    try:
        write_trusted(os.path.join(directory, f"{key}.json"), json.dumps(data).encode())
    except OSError:
        pass


def read_outcomes(directory: str) -> list[AgentOutcome]:
    """What the agents left, in the order of their names; what cannot be read is left out."""
    import json

    found = []
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except OSError:
        return []
    for name in names:
        try:
            with open(open_trusted(os.path.join(directory, name)), "rb") as file:
                outcome = decoded(json.loads(file.read(_LONGEST)))
        except (OSError, ValueError, RecursionError):
            continue
        if outcome is not None:
            found.append(outcome)
    return found


def decoded(data: Mapping[str, object]) -> AgentOutcome | None:
    """An outcome from its JSON; None: it is not one."""
    if not isinstance(data, dict):
        return None
    node, outcome, code = data.get("node"), data.get("outcome"), data.get("code")
    reason = data.get("reason", "")
    if not (isinstance(node, str) and isinstance(outcome, str) and type(code) is int and 0 <= code < 256):
        return None
    hosts = data.get("quarantined", [])
    named = tuple(one for one in hosts if isinstance(one, str)) if isinstance(hosts, list) else ()
    return AgentOutcome(node, outcome, code, reason if isinstance(reason, str) else "", named)
