"""Where torch is loaded, Phalanx's exceptions are torch's as well: `except` clauses for torch catch them."""

from __future__ import annotations

import copy
import importlib
import pickle
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from phalanx import errors
from phalanx.agent.workers.failure import ProcessFailure
from tests.conftest import HUNG

FAILED = {0: ProcessFailure(0, 77, 3, "<N/A>")}
INSTANCES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ChildFailedError": ("elastic.multiprocessing.errors", ("train.py", FAILED)),
    "SignalException": ("elastic.multiprocessing.api", ("stopped", signal.SIGTERM)),
    "RendezvousError": ("elastic.rendezvous.api", ("no",)),
    "RendezvousClosedError": ("elastic.rendezvous.api", ("no",)),
    "RendezvousTimeoutError": ("elastic.rendezvous.api", ("no",)),
    "RendezvousConnectionError": ("elastic.rendezvous.api", ("no",)),
    "RendezvousStateError": ("elastic.rendezvous.api", ("no",)),
    "RendezvousGracefulExitError": ("elastic.rendezvous.api", ("no",)),
}


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch.distributed.elastic")


@pytest.mark.parametrize("name", INSTANCES)
def test_a_clause_for_torchs_catches_ours(torch: ModuleType, name: str) -> None:
    path, args = INSTANCES[name]
    theirs = getattr(importlib.import_module(f"torch.distributed.{path}"), name)
    ours: Any = getattr(errors, name)
    try:
        raise ours(*args)
    except theirs as error:
        caught = error
    assert isinstance(caught, ours)
    assert type(caught).__name__ == name
    assert type(caught) is type(ours(*args)), "made once"
    if name != "SignalException":
        for again in (pickle.loads(pickle.dumps(caught)), copy.copy(caught)):
            assert isinstance(again, ours)
            assert again.args == caught.args
        if name != "ChildFailedError":
            assert str(caught) == "no"


def test_what_it_carries_is_ours(torch: ModuleType) -> None:
    error = errors.ChildFailedError("train.py", FAILED)
    assert (error.name, error.failures) == ("train.py", FAILED)
    assert error.get_first_failure() == (0, FAILED[0])
    assert "Root cause: rank 0" in str(error)
    stop = errors.SignalException("stopped", signal.SIGTERM)
    assert (str(stop), stop.sigval) == ("stopped", signal.SIGTERM)


def test_a_failed_function_is_of_all_three_types(torch: ModuleType) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Theirs

    from phalanx.elastic.agent.elastic_launch import of_both_types

    error = of_both_types(errors.ChildFailedError("train.py", FAILED), ValueError("bad"))
    assert isinstance(error, Theirs)
    assert isinstance(error, errors.ChildFailedError)
    assert isinstance(error, ValueError)


def test_without_torch_nothing_is_made() -> None:
    code = (
        "import sys; from phalanx.errors import RendezvousClosedError as E; "
        "assert type(E('x')) is E; assert not any(name.startswith('torch') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=HUNG, check=True)
