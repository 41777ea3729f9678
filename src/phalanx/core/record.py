"""The one way to define a class of values, at a fraction of the cost of a dataclass or a named tuple.

Every `phalanx run` defines some thirty such classes before the first worker starts. A dataclass costs most of
a millisecond each, because its methods are compiled one by one, and a named tuple a quarter of that. A
record is a plain class; type checkers see a dataclass.

    class Point(Record):
        x: int
        y: int = 0

A record is frozen: `replace()` makes a changed copy. torch's public classes can be modified; for those,
`frozen=False` makes the attributes assignable. Such a class may also define `__init__`, for example to
check its arguments; its fields are then the parameters.

    class Result(Record, frozen=False):
        state: str
        failures: dict[int, str] = {}  # every instance gets a dict of its own

`dataclasses.replace`, `asdict` and `fields` accept records, and `@dataclass` can extend a record that is not
frozen.

Invariants: records are equal if they have the same type and the same values. Instances share
their defaults, except for the dicts of records that are not frozen. This module imports nothing;
`dataclasses` and `inspect` are loaded only when `dataclasses` asks for the fields.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost as much as all the types here together
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

    from typing_extensions import Self
    from typing_extensions import dataclass_transform as dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


class _Computed:
    """An attribute that `dataclasses` or `inspect` looks up; taken from a real dataclass on access."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _instance: object, owner: type[Record]) -> Any:
        own_init = owner.__init__ is not Record.__init__
        signature = self._name == "__signature__"
        if owner is Record or (signature and own_init):
            raise AttributeError(self._name)  # it has no fields, or `inspect` can read its own __init__
        # A subclass may have an __init__ of its own; the fields are those of the class it extends.
        kind = next(base for base in owner.__mro__ if Record in base.__bases__) if own_init else owner
        made = _as_dataclass(kind)
        if signature:
            import inspect

            return inspect.signature(made)
        return vars(made)[self._name]


def _as_dataclass(kind: type[Record]) -> type:
    import dataclasses
    import inspect

    if kind.__init__ is Record.__init__:
        annotations = {
            name: a for base in kind.__mro__[::-1] for name, a in inspect.get_annotations(base).items()
        }
        fields = [(name, annotations[name], dataclasses.field()) for name in kind._fields]
        for name, _, field in fields:
            if name in kind._defaults:
                field.default = kind._defaults[name]
                if field.default == {}:
                    field.default, field.default_factory = dataclasses.MISSING, dict
        return dataclasses.make_dataclass(kind.__name__, fields, frozen=_is_frozen(kind))
    annotations = inspect.get_annotations(kind)
    # With an __init__ of its own: the parameters, and the annotations for what it computes.
    described: list[tuple[str, str, Any]] = []
    computed = [(name, annotation, dataclasses.field(init=False)) for name, annotation in annotations.items()]
    for name, parameter in inspect.signature(kind).parameters.items():
        annotation = str(parameter.annotation)
        settings: dict[str, Any] = {}
        if parameter.default is None and annotation.startswith("dict["):
            settings["default_factory"] = dict  # None stands for an empty dict there
        elif parameter.default is not parameter.empty:
            settings["default"] = parameter.default
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings["kw_only"] = True
            described += computed
            computed = []
        described.append((name, annotation, dataclasses.field(**settings)))
    return dataclasses.make_dataclass(kind.__name__, described + computed)


def _is_frozen(kind: type[Record]) -> bool:
    return kind.__setattr__ is not object.__setattr__


@dataclass_transform(frozen_default=True)
class Record:
    """The base class; fields are the annotations, in order, those of a base record first."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _fresh: ClassVar[tuple[str, ...]] = ()  # fields whose default is an empty dict
    __match_args__: ClassVar[tuple[str, ...]] = ()
    if not TYPE_CHECKING:
        __dataclass_fields__ = _Computed()
        __dataclass_params__ = _Computed()
        __signature__ = _Computed()

    def __init_subclass__(cls, frozen: bool = True) -> None:
        if not frozen:
            cls.__setattr__ = object.__setattr__  # type: ignore[method-assign, assignment]
            cls.__delattr__ = object.__delattr__  # type: ignore[method-assign, assignment]
            cls.__hash__ = None  # type: ignore[assignment]
        if cls.__init__ is Record.__init__:
            own, body = cls.__annotations__, cls.__dict__
            cls._fields = cls.__match_args__ = cls._fields + tuple(own)  # type: ignore[misc]  # not final yet
            defaults = {name: body[name] for name in own if name in body}
            cls._defaults = cls._defaults | defaults if cls._defaults else defaults
            if not _is_frozen(cls):
                cls._fresh = tuple(name for name, value in cls._defaults.items() if value == {})

    def __init__(self, *args: Any, **named: Any) -> None:
        fields, values = self._fields, self.__dict__
        values.update(self._defaults)
        for name in self._fresh:
            values[name] = {}
        if args:
            values.update(zip(fields, args))  # noqa: B905 - strict= takes time, and the lengths are checked below
        if named:
            values.update(named)
        if (
            len(values) != len(fields)
            or len(args) > len(fields)
            or (args and named and not named.keys().isdisjoint(fields[: len(args)]))
        ):
            raise TypeError(
                f"{type(self).__name__}({', '.join(fields)}) cannot be created from {len(args)} values"
                f" and {sorted(named)}"
            )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: use replace() to make another")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), *map(self.__dict__.__getitem__, self._fields)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"

    def as_dict(self) -> dict[str, Any]:
        """The fields and their values, in order."""
        values = self.__dict__
        # A class with an __init__ of its own: in the order of assignment.
        return {name: values[name] for name in self._fields or values}

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return type(self)(**{**self.__dict__, **changes})
