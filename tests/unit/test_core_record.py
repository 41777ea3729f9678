"""Records: compared by type and value, strict about their fields, and dataclasses to `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.agent.logs.specs import LogsDest
from phalanx.agent.spec import WorkerSpec
from phalanx.agent.workers.failure import ProcessFailure
from phalanx.agent.workers.result import RunProcsResult, RunResult
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.events import WorkerState
from phalanx.core.record import Record
from phalanx.job.numa import AffinityMode, NumaOptions, Topology
from phalanx.worker.error_file import message_data, write_data
from tests.conftest import HUNG


class Point(Record):
    x: int
    y: int = 0


class Size(Record):
    x: int
    y: int = 0


class Empty(Record):
    """No fields."""


def test_values_and_repr() -> None:
    assert (Point(1).x, Point(1).y, Point(1, 2).y, Point(y=3, x=4).x) == (1, 0, 2, 4)
    assert repr(Point(y=3, x=4)) == "Point(x=4, y=3)"
    assert repr(Empty()) == "Empty()"
    assert Empty()


def test_equality_minds_the_type() -> None:
    assert Point(1, 2) == Point(y=2, x=1)
    assert Point(1, 2) != Size(1, 2)
    assert Point(1) != (1, 0)
    assert hash(Point(1)) == hash(Point(1, 0))
    assert len({Point(1), Point(1, 0), Size(1)}) == 2


@pytest.mark.parametrize(
    ("args", "named"), [((), {}), ((1, 2, 3), {}), ((1,), {"z": 1}), ((1,), {"x": 1}), ((), {"y": 1})]
)
def test_wrong_fields_are_refused(args: tuple[int, ...], named: dict[str, int]) -> None:
    with pytest.raises(TypeError, match=r"Point\(x, y\)"):
        Point(*args, **named)


def test_frozen() -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match=r"Point\.x cannot be set"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"Point\.x cannot be deleted"):
        del point.x
    assert point.replace(y=5) == Point(1, 5)
    assert point == Point(1)
    with pytest.raises(TypeError):
        point.replace(z=1)


def test_matching_copying_pickling() -> None:
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)
    assert copy.copy(Point(1)) == pickle.loads(pickle.dumps(Point(1))) == Point(1)


class Box(Record, frozen=False):
    name: str
    content: dict[str, int] = {}


class Crate(Box):
    weight: float = 0.0
    labels: dict[str, str] = {}


def test_a_record_that_is_not_frozen() -> None:
    box, other = Box("a"), Box("a")
    assert box == other
    box.content["nails"] = 3
    assert (other.content, Box("a").content) == ({}, {}), "every instance has a dict of its own"
    box.name = "b"
    assert repr(box) == "Box(name='b', content={'nails': 3})"
    del box.name
    with pytest.raises(TypeError, match="unhashable"):
        hash(box)
    with pytest.raises(TypeError, match=r"Box\(name, content\)"):
        Box()


def test_a_record_extends_another() -> None:
    crate = Crate("c", weight=2.5)
    assert repr(crate) == "Crate(name='c', content={}, weight=2.5, labels={})"
    crate.weight = 3.0
    assert crate != Crate("c", weight=2.5)
    assert Crate("c").labels is not Crate("c").labels
    assert Crate("c").content is not Crate("c").content
    assert [field.name for field in dataclasses.fields(crate)] == ["name", "content", "weight", "labels"]
    assert list(inspect.signature(Crate).parameters) == ["name", "content", "weight", "labels"]
    assert list(inspect.signature(ProcessFailure).parameters)[:2] == ["local_rank", "pid"]


def test_frozen_records_are_dataclasses_too() -> None:
    made = NumaOptions(AffinityMode.NODE)
    assert dataclasses.asdict(made) == {"affinity_mode": "node", "should_fall_back_if_binding_fails": False}
    again = dataclasses.replace(made, should_fall_back_if_binding_fails=True)
    assert again == NumaOptions(AffinityMode.NODE, True)
    assert dataclasses.replace(Topology({0: 1})) == Topology({0: 1})
    assert not dataclasses.is_dataclass(Record)


# ---- torch's dataclasses -------------------------------------------------------------------------


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


def test_a_failure_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_data(str(path), message_data("ValueError: no", "", 12_500_000_000))
    failure = ProcessFailure(1, 77, 3, str(path), exited_at=13.0, role="trainer")
    names = [field.name for field in dataclasses.fields(failure)]
    assert names[:7] == [
        "local_rank", "pid", "exitcode", "error_file", "error_file_data", "message", "timestamp"
    ]  # fmt: skip
    moved = dataclasses.replace(failure, local_rank=2)
    assert (moved.local_rank, moved.message, moved.timestamp, moved.role) == (
        2, "ValueError: no", 12, "trainer"
    )  # fmt: skip
    assert dataclasses.replace(failure) == failure != moved
    with pytest.raises((TypeError, ValueError), match="message"):
        dataclasses.replace(failure, message="mine")
    told = dataclasses.asdict(failure)
    assert json.loads(json.dumps(told)) == told
    assert told["message"] == "ValueError: no"
    assert pickle.loads(pickle.dumps(failure)) == failure == copy.deepcopy(failure)
    assert "error_file_data" not in repr(failure)


@dataclasses.dataclass
class Placed(ProcessFailure):
    rack: str = dataclasses.field(default="", kw_only=True)


def test_a_subclass_of_a_failure_reads_the_file_as_well() -> None:
    placed = Placed(0, 5, -9, "", rack="b2")
    assert (placed.rack, placed.signal_name(), placed.evidence) == ("b2", "SIGKILL", "")
    assert "SIGKILL" in placed.message


@pytest.mark.untraced
def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from phalanx.agent.workers.result import RunResult;"
        "from phalanx.agent.workers.failure import ProcessFailure;"
        "ProcessFailure(0, 1, -9, '').ending(); assert 'dataclasses' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG)
