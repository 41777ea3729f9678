"""torch's public names exist here, at the same path and with signatures that its callers can use.

One line per package in `PACKAGES`; its modules are found by looking at torch. A difference that is meant is
listed with its reason, and a listed difference that is none any more fails too.

Public is what `__all__` names, or, without one, what the module defines itself with no leading underscore.
Compatible: every parameter of torch's with the same name, place, kind and default; ours may have more, with
defaults. Annotations do not count.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Package:
    """A package of torch, its counterpart here, and what is different on purpose: path below it → reason."""

    theirs: str
    ours: str
    exceptions: dict[str, str] = field(default_factory=dict)


PACKAGES = [
    Package(
        "torch.distributed.elastic.multiprocessing",
        "phalanx.elastic.multiprocessing",
        dict.fromkeys(
            (
                "subprocess_handler.SubprocessHandler",
                "subprocess_handler.subprocess_handler.SubprocessHandler",
            ),
            "numa_options may be left out, as before torch 2.9: dlrover does",
        ),
    ),
    Package("torch.distributed.elastic.events", "phalanx.elastic.events"),
    Package("torch.distributed.elastic.metrics", "phalanx.elastic.metrics"),
]


@pytest.fixture(scope="session", autouse=True)
def torch_is_loaded() -> None:
    """Before any test, so that what torch leaves open belongs to none of them."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("CI"):
            pytest.fail("torch is not installed; in CI parity has to be checked")
        pytest.skip("torch is not installed")
    for package in PACKAGES:
        importlib.import_module(package.theirs)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.ours)
def test_parity(package: Package) -> None:
    found = list(differences(package))
    unexpected = [f"{path}: {what}" for path, what in found if path not in package.exceptions]
    assert not unexpected, "\n" + "\n".join(unexpected)
    stale = set(package.exceptions) - {path for path, _ in found}
    assert not stale, f"no difference any more: {sorted(stale)}"


def differences(package: Package) -> Iterator[tuple[str, str]]:
    """Path below the package, and what is wrong there."""
    for name in module_names(package.theirs):
        path = name.removeprefix(package.theirs).removeprefix(".")
        theirs = importlib.import_module(name)
        try:
            ours = importlib.import_module(package.ours + name.removeprefix(package.theirs))
        except ImportError as error:
            yield path, f"module cannot be imported: {error}"
            continue
        for public in public_names(theirs):
            where = f"{path}.{public}" if path else public
            if not hasattr(ours, public):
                yield where, "is missing"
            else:
                yield from compare(where, getattr(theirs, public), getattr(ours, public))


def module_names(package: str) -> list[str]:
    top = importlib.import_module(package)
    below = pkgutil.walk_packages(getattr(top, "__path__", []), package + ".")
    return [package, *(m.name for m in below if not m.name.rpartition(".")[2].startswith("_"))]


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", "") == module.__name__ or isinstance(value, functools.partial))
    ]


def compare(where: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    if inspect.isclass(theirs):
        if not inspect.isclass(ours):
            yield where, f"is a class there and {ours!r} here"
        elif issubclass(theirs, enum.Enum):
            yield from compare_members(where, theirs, ours)
        else:
            yield from compare_signatures(where, theirs, ours)
            yield from compare_classes(where, theirs, ours)
    elif callable(theirs):
        yield from compare_signatures(where, theirs, ours)


def compare_members(where: str, theirs: type[enum.Enum], ours: Any) -> Iterator[tuple[str, str]]:
    mine = {name: member.value for name, member in getattr(ours, "__members__", {}).items()}
    yours = {name: member.value for name, member in theirs.__members__.items()}
    if mine != yours:
        yield where, f"members are {yours} there and {mine} here"
    yield from compare_classes(where, theirs, ours)


def compare_classes(where: str, theirs: type, ours: type) -> Iterator[tuple[str, str]]:
    for base in theirs.__mro__:
        if base.__module__ in ("builtins", "enum") and not issubclass(ours, base):
            yield where, f"is a {base.__name__} there but not here"
            break
    if dataclasses.is_dataclass(theirs):
        names = fields_of(ours)
        for missing in [f.name for f in dataclasses.fields(theirs) if f.name not in names]:
            yield f"{where}.{missing}", "field is missing"
    demanded = abstract(ours) - abstract(theirs)
    # A class that is completed through private methods is not made to be subclassed by others.
    if demanded and not any(name.startswith("_") for name in abstract(theirs)):
        yield where, f"subclasses have to write {sorted(demanded)} here but not there"
    for name, attribute in own_attributes(theirs).items():
        inner = f"{where}.{name}"
        if name in getattr(ours, "__dataclass_fields__", {}):
            continue
        if not hasattr(ours, name):
            yield inner, "is missing"
        elif inspect.isroutine(attribute):
            yield from compare_signatures(inner, getattr(theirs, name), getattr(ours, name))


def fields_of(kind: type) -> set[str]:
    """A dataclass's fields; what instances have, where a plain class can be made without arguments."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    try:
        return {*dir(kind), *vars(kind())}
    except TypeError:
        return {*dir(kind), *inspect.signature(kind).parameters}


def abstract(kind: type) -> set[str]:
    return set(getattr(kind, "__abstractmethods__", ()))


def own_attributes(kind: type) -> dict[str, Any]:
    """Public attributes that torch itself gave the class, inherited ones included."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("torch"):
            found.update((name, value) for name, value in vars(base).items() if not name.startswith("_"))
    return found


def compare_signatures(where: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    try:
        wanted = signature(theirs)
    except (ValueError, TypeError):
        return
    try:
        given = signature(ours)
    except (ValueError, TypeError) as error:
        yield where, f"has no signature here: {error}"
        return
    reason = incompatible(list(wanted.parameters.values()), list(given.parameters.values()))
    if reason:
        yield where, f"{reason}\n  there {_bare(wanted)}\n  here  {_bare(given)}"


def signature(of: Any) -> inspect.Signature:
    """As inspect's, but with the values that a class makes for its defaults, not the marks for them."""
    found = inspect.signature(of)
    made: dict[str, Any] = {}
    if inspect.isclass(of) and dataclasses.is_dataclass(of):
        for f in dataclasses.fields(of):
            if f.default_factory is not dataclasses.MISSING:
                made[f.name] = f.default_factory()
    elif inspect.isclass(of) and all(p.default is not p.empty for p in found.parameters.values()):
        try:
            made = {name: value for name, value in vars(of()).items() if name in found.parameters}
        except TypeError:
            made = {}
    shown = [p.replace(default=made.get(p.name, p.default)) for p in found.parameters.values()]
    return found.replace(parameters=shown)


def incompatible(wanted: list[inspect.Parameter], given: list[inspect.Parameter]) -> str:
    """Why a call that was written for `wanted` may not suit `given`; empty: it does."""
    places = [p.name for p in given]
    for index, theirs in enumerate(wanted):
        if theirs.name not in places:
            return f"parameter {theirs.name!r} is missing"
        ours = given[places.index(theirs.name)]
        if ours.kind != theirs.kind:
            return (
                f"parameter {theirs.name!r} is {theirs.kind.description} there, {ours.kind.description} here"
            )
        positional = theirs.kind in (theirs.POSITIONAL_ONLY, theirs.POSITIONAL_OR_KEYWORD)
        if positional and places.index(theirs.name) != index:
            return f"parameter {theirs.name!r} is at another place"
        if not _same_default(theirs.default, ours.default):
            return (
                f"parameter {theirs.name!r} has the default {theirs.default!r} there, {ours.default!r} here"
            )
    for more in given:
        if more.name in {p.name for p in wanted}:
            continue
        if more.default is more.empty and more.kind not in (more.VAR_POSITIONAL, more.VAR_KEYWORD):
            return f"parameter {more.name!r} has no default"
    return ""


def _same_default(theirs: Any, ours: Any) -> bool:
    if theirs is inspect.Parameter.empty or ours is inspect.Parameter.empty:
        return theirs is ours
    if inspect.isfunction(theirs) and inspect.isfunction(ours):
        return True  # two functions of one purpose are never equal
    # repr for defaults that are objects of a class of torch's and of its counterpart.
    return bool(theirs == ours) or repr(theirs) == repr(ours)


def _bare(of: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in of.parameters.values()]
    return str(inspect.Signature(bare))


# -- the comparison itself can tell -------------------------------------------------------------------


def _wanted(a, b=1, *, c=None): ...  # type: ignore[no-untyped-def]


SUITABLE = [
    lambda a, b=1, *, c=None: 0,
    lambda a, b=1, more=2, *, c=None, other=3: 0,
    lambda a, b=1, *args, c=None, **kwargs: 0,
]
UNSUITABLE = {
    "missing": lambda a, b=1: 0,
    "another place": lambda a, more=2, b=1, *, c=None: 0,
    "keyword-only": lambda a, *, b=1, c=None: 0,
    "default": lambda a, b=2, *, c=None: 0,
    "no default": lambda a, b=1, *, more, c=None: 0,
}


@pytest.mark.parametrize("suitable", SUITABLE)
def test_a_compatible_signature(suitable: Any) -> None:
    assert not list(compare_signatures("f", _wanted, suitable))


@pytest.mark.parametrize("why", UNSUITABLE)
def test_an_incompatible_signature(why: str) -> None:
    ((where, text),) = compare_signatures("f", _wanted, UNSUITABLE[why])
    assert where == "f"
    assert why in text
