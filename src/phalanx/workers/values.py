"""Classes that compare and print by their attributes, and that `dataclasses` takes for its own.

What a dataclass does for a mutable class, without importing dataclasses, which takes longer than the rest of
the agent's start. People who know these classes from torch call `dataclasses.replace` and `asdict` on them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _OfDataclass:
    """What `dataclasses` keeps with a class of its own, from the signature; made when it is looked at."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _instance: object, owner: type) -> Any:
        import dataclasses
        import inspect

        # Of the class that says what there is: a subclass may have an __init__ of its own.
        kind = next(base for base in owner.__mro__ if ByValue in base.__bases__ or base is ByValue)
        described: list[tuple[str, str, Any]] = []
        # What the class annotates but does not take is found out when one is made.
        found_out = [
            (name, annotation, dataclasses.field(init=False))
            for name, annotation in inspect.get_annotations(kind).items()
        ]
        for name, parameter in inspect.signature(kind).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                described += found_out
                found_out = []
            annotation = str(parameter.annotation)
            settings: dict[str, Any] = {}
            if parameter.default is None and annotation.startswith("dict["):
                settings["default_factory"] = dict  # a None there stands for an empty one
            elif parameter.default is not parameter.empty:
                settings["default"] = parameter.default
            if parameter.kind is parameter.KEYWORD_ONLY:
                settings["kw_only"] = True
            described.append((name, annotation, dataclasses.field(**settings)))
        described += found_out
        return vars(dataclasses.make_dataclass(kind.__name__, described))[self._name]


class ByValue:
    """Equal when of one type and with equal attributes."""

    __dataclass_fields__ = _OfDataclass()
    __dataclass_params__ = _OfDataclass()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # the attributes can be set
