"""Classes that compare by value, and that people treat as the dataclasses they are in torch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from phalanx.agent.spec import RunResult, WorkerSpec
from phalanx.core.messages import WorkerState
from phalanx.processes.logs import LogsDest
from phalanx.processes.result import RunProcsResult
from phalanx.rendezvous.solo import SoloRendezvous
from tests.conftest import HUNG


def spec() -> WorkerSpec:
    return WorkerSpec("trainer", 2, SoloRendezvous("job"), entrypoint="train.py", args=("--lr", 0.1))


@pytest.mark.parametrize(
    "value",
    [RunProcsResult({0: 1}), RunResult(WorkerState.SUCCEEDED, {3: "x"}), LogsDest({0: "out"}), spec()],
)
def test_they_are_dataclasses_to_who_asks(value: object) -> None:
    assert dataclasses.is_dataclass(value)
    assert [field.name for field in dataclasses.fields(value)] == list(vars(value))
    again = dataclasses.replace(value)
    assert again == value
    assert again is not value
    assert copy.copy(value) == value
    with pytest.raises(TypeError, match="unhashable"):
        hash(value)


def test_as_plain_data() -> None:
    made = RunResult(WorkerState.FAILED, {0: [1]})
    told = dataclasses.asdict(made)
    assert told == {"state": WorkerState.FAILED, "return_values": {0: [1]}, "failures": {}, "stopped": {}}
    assert told["return_values"] is not made.return_values
    assert dataclasses.asdict(pickle.loads(pickle.dumps(made))) == told


def test_replacing_is_checked_like_making() -> None:
    changed = dataclasses.replace(spec(), max_restarts=0)
    assert (changed.max_restarts, changed.args) == (0, ("--lr", 0.1))
    assert changed != spec()
    with pytest.raises(ValueError, match="max_restarts=-2"):
        dataclasses.replace(changed, max_restarts=-2)


@dataclasses.dataclass
class Timed(RunProcsResult):
    seconds: float = 0.0


class Told(RunResult):
    def __init__(self, why: str) -> None:
        super().__init__(WorkerState.FAILED)
        self.why = why


def test_subclasses() -> None:
    timed = Timed({0: 1}, seconds=2.5)
    assert (timed.return_values, timed.failures, timed.seconds) == ({0: 1}, {}, 2.5)
    assert Timed().return_values is not Timed().return_values
    assert not timed.is_failed()
    assert timed != RunProcsResult({0: 1})
    assert [field.name for field in dataclasses.fields(Told)] == [
        f.name for f in dataclasses.fields(RunResult)
    ]
    assert Told("a") == Told("a") != Told("b")


def test_nothing_is_imported_for_it() -> None:
    code = "import sys; from phalanx.agent.spec import RunResult; assert 'dataclasses' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG)
