"""Records: frozen, compared by type and value, strict about their fields."""

from __future__ import annotations

import copy
import pickle

import pytest

from phalanx.core.record import Record


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
