"""Imports in the zygote, before it forks: what the workers would all import anyway, done once.

Rules, each checked while it happens and not promised by a list:
* Only installed packages and the standard library. The user's own modules are executed fresh in every
  worker, whatever their names.
* A module that raises is left out. One that leaves a thread which a fork does not stop, opens a device
  or a socket, hangs, or kills the process, spoils this zygote: the keeper forks another one, without it.
* Threads are judged by evidence: pools that know about fork (OpenBLAS) end their threads when the
  process forks, so a trial fork tells them from threads that would be lost without anybody noticing.

What happens is told to the keeper line by line, so that it knows the culprit even of a crash:
`import NAME`, `drop NAME: why`, `spoiled NAME: why`, `done COUNT`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SPOILED = 77  # the exit status of a zygote that must not be forked from

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_NEVER = frozenset({"__main__", "phalanx", "sitecustomize", "usercustomize", "antigravity", "this"})


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import them, in this order; ends the process when it is spoiled."""
    import gc

    homes = _homes()
    verdicts: dict[str, bool] = {}
    fds = _descriptors()
    count = 0
    for name in names:
        top = name.partition(".")[0]
        if name in sys.modules or top in _NEVER:
            continue
        if top not in verdicts:
            verdicts[top] = _is_installed(top, homes)
        if not verdicts[top]:
            continue
        tell(f"import {name}")
        if not _import(name, tell):
            continue
        count += 1
        why = _spoilt_by_threads()
        now = _descriptors()
        if not why and len(now) > len(fds):
            why = next(
                (f"opens {what}" for fd, what in now.items() if fd not in fds and _is_device(what)), ""
            )
            fds = now
        if why:
            tell(f"spoiled {name}: {why}")
            os._exit(SPOILED)
    gc.collect()
    gc.freeze()  # a collection in a worker would write into every shared page otherwise
    tell(f"done {count}")


def _import(name: str, tell: Callable[[str], None]) -> bool:
    before = dict(os.environ)
    try:
        __import__(name)
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
        # What cannot be imported is no news: optional imports are recorded as well.
        if not isinstance(error, ImportError):
            tell(f"drop {name}: {type(error).__name__}")
        return False
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]  # an import must not speak for workers whose environment is yet to come
        for key, value in before.items():
            if os.environ.get(key) != value:
                os.environ[key] = value
    return True


def _homes() -> tuple[str, ...]:
    """Where installed packages and the standard library live."""
    homes = [path for path in sys.path if path.endswith(("site-packages", "dist-packages", ".zip"))]
    library = os.path.dirname(os.__file__)
    return tuple(os.path.join(path, "") for path in [*homes, library, os.path.join(library, "lib-dynload")])


def _is_installed(top: str, homes: tuple[str, ...]) -> bool:
    if top in sys.builtin_module_names:
        return True
    from importlib.machinery import PathFinder

    try:
        spec = PathFinder.find_spec(top)
    except Exception:  # noqa: BLE001 - an import hook of somebody's
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(place is not None and place.startswith(homes) for place in places)


def _spoilt_by_threads() -> str:
    if _threads() <= 1:
        return ""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    left = _threads() - 1
    return f"leaves {left} thread{'s' * (left > 1)} running" if left > 0 else ""


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def _descriptors() -> dict[str, str]:
    found = {}
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for fd in entries:
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


def _is_device(what: str) -> bool:
    return what.startswith(_DEVICES) or what.startswith("socket:")
