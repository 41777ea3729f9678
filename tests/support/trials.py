"""Trials: one fault against a job of its own, once in every run of the tests and 200 times in the long one.

Most of a trial is waiting, for a lease or a grace; so the long form has several under way at once, each in a
directory of its own. All of them are played, and the failures are reported with their numbers.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TRIALS = int(os.environ.get("TRIALS", "200"))  # fewer where there is no time for them
AT_ONCE = 4


def few_or_many(ways: int = 1, few: int = 1) -> pytest.MarkDecorator:
    """`times` a test is played: 200 in the long form, over all the `ways` in which it is parametrized."""
    many = -(-TRIALS // ways)
    return pytest.mark.parametrize(
        "times", [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.long)]
    )


def play(times: int, folder: Path, trial: Callable[[Path], None], at_once: int = AT_ONCE) -> None:
    """Play a trial so often, each in a new directory."""
    failed: list[str] = []

    def one(turn: int) -> None:
        place = folder / str(turn)
        place.mkdir()
        try:
            trial(place)
        except BaseException:  # noqa: BLE001 - reported below, with all others
            failed.append(f"---- trial {turn}\n{traceback.format_exc()}")
        else:
            shutil.rmtree(place, ignore_errors=True)

    if times == 1:
        (folder / "0").mkdir()
        trial(folder / "0")
        return
    with ThreadPoolExecutor(min(at_once, times)) as pool:
        try:
            list(pool.map(one, range(times)))
        except BaseException:  # an interrupt
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    assert not failed, f"{len(failed)} of {times} trials failed\n" + "\n".join(failed[:5])
