"""Classes that compare and print by their attributes.

What a dataclass does for a mutable class, without importing dataclasses, which takes longer than the rest of
the agent's start.
"""

from __future__ import annotations


class ByValue:
    """Equal when of one type and with equal attributes."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # the attributes can be set
