"""How the packages at torch's import paths import their submodules.

In torch, importing a package imports most of its submodules, so that `mp.errors.record` works after `import
…elastic.multiprocessing as mp`. Here a submodule is imported on first use: most programs need one name.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def below(package: str, *names: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package with these submodules."""

    def find(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"{package}.{name}")

    return find
