"""Frozen records: what dataclasses and named tuples offer, at a fraction of their price.

The core defines some thirty small types, and every `phalanx run` pays for defining them before it can do
anything. A frozen dataclass costs most of a millisecond each (its methods are compiled one by one), a
named tuple a quarter of that (each annotation is compiled), and a named tuple equals every other tuple with
the same values. Here a subclass is a plain class and equality minds the type. Type checkers see a
dataclass.

    class Point(Record):
        x: int
        y: int = 0

Invariants: the values are fixed once made; defaults are shared by all instances, so only immutable ones.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost as much as all the types here together
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn, Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(frozen_default=True)
class Record:
    """The base; fields are the annotations of the subclass itself, in order."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(cls.__annotations__)
        cls.__match_args__ = cls._fields  # type: ignore[misc]  # final once the class is made; it is not yet
        cls._defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}

    def __init__(self, *args: Any, **named: Any) -> None:
        fields, values = self._fields, self.__dict__
        values.update(self._defaults)
        values.update(zip(fields, args, strict=False))
        values.update(named)
        if (
            len(values) != len(fields)
            or len(args) > len(fields)
            or not named.keys().isdisjoint(fields[: len(args)])
        ):
            raise TypeError(
                f"{type(self).__name__}({', '.join(fields)}) cannot be made of {len(args)} values"
                f" and {sorted(named)}"
            )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: use replace() to make another")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *map(self.__dict__.__getitem__, self._fields)))

    def __repr__(self) -> str:
        values = self.__dict__
        return f"{type(self).__name__}({', '.join(f'{name}={values[name]!r}' for name in self._fields)})"

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return type(self)(**{**self.__dict__, **changes})
