"""How the packages at torch's import paths find what lies below them.

In torch, importing a package imports most of what is in it, so that after `import …elastic.multiprocessing as
mp` people write `mp.errors.record`. Here a module is imported when it is first written so: most programs need
one name of all this.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def below(package: str, *names: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package that has these modules in it."""

    def find(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"{package}.{name}")

    return find
