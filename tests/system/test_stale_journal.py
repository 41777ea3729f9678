"""A store whose journal is older than what it had answered, damaged or gone: jobs form again and go on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import gone, wait_until
from tests.support.netns import Job, Node, Worker, tell
from tests.support.run_helpers import PHALANX
from tests.support.trials import few_or_many, play
from tests.system.test_cluster import everybody, separate_store, succeed

pytestmark = pytest.mark.thorough

STORE = [PHALANX[0], "store"]


def copy(source: Path, target: Path) -> None:
    """A journal of a store that was killed, with its write-ahead log."""
    for end in ("", "-wal"):
        if os.path.exists(f"{source}{end}"):
            shutil.copyfile(f"{source}{end}", f"{target}{end}")
        elif os.path.exists(f"{target}{end}"):
            os.unlink(f"{target}{end}")


def fail(nodes: list[Node]) -> list[Worker]:
    """Have the second node's worker fail; a restart of the store may have taken longer than a lease."""
    while True:
        workers = in_one_world(nodes, [])
        try:
            tell(workers[1:], signal.SIGUSR2)
        except ProcessLookupError:
            continue
        return workers


def in_one_world(nodes: list[Node], old: list[Worker]) -> list[Worker]:
    """Wait until the nodes run one world that is not the old one."""

    def formed() -> bool:
        found = [node.latest() for node in nodes]
        return len({w.port for w in found if w}) == 1 and all(
            w and w.world == len(nodes) and w.pid not in {o.pid for o in old} and not gone(w.pid)
            for w in found
        )

    wait_until(formed, "a new world")
    assert all(gone(worker.pid) for worker in old)
    return [w for node in nodes if (w := node.latest())]


@few_or_many(ways=5)
@pytest.mark.parametrize("state", ["before the job", "before the last round", "no log", "empty", "removed"])
def test_a_job_survives_a_journal_that_went_back(tmp_path: Path, state: str, times: int) -> None:
    def trial(folder: Path) -> None:
        journal, old = folder / "journal", folder / "old"
        with Job(
            folder, "1:2", "", "--max-restarts", "5", conf="is_host=0,last_call_timeout=20,ttl=6"
        ) as job:
            store = separate_store(job, "--journal", str(journal))
            if state == "before the job":
                store.signal(signal.SIGKILL)
                store.process.wait()
                copy(journal, old)
                store = separate_store(job, "--journal", str(journal))
            nodes = [job.node(name) for name in "ab"]
            everybody(nodes, 2)
            if state == "before the last round":
                store.signal(signal.SIGKILL)
                store.process.wait()
                copy(journal, old)
                store = separate_store(job, "--journal", str(journal))
            workers = in_one_world(nodes, fail(nodes))
            assert {w.attempt for w in workers} == {1}
            store.signal(signal.SIGKILL)
            store.process.wait()
            match state:
                case "no log":
                    os.truncate(f"{journal}-wal", 0)
                case "empty":
                    os.truncate(journal, 0)
                    os.unlink(f"{journal}-wal")
                case "removed":
                    os.unlink(journal)
                    os.unlink(f"{journal}-wal")
                case _:
                    copy(old, journal)
            store = separate_store(job, "--journal", str(journal))
            workers = in_one_world(nodes, workers)
            assert {w.attempt for w in workers} == {1}, "no restart was used, and none forgotten"
            succeed(nodes, workers)

    play(times, tmp_path, trial)


def test_a_damaged_journal_is_refused_and_the_job_waits_for_another(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Job(tmp_path, "2", "", "--max-restarts", "5", conf="is_host=0,ttl=6") as job:
        store = separate_store(job, "--journal", str(journal))
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        store.signal(signal.SIGKILL)
        store.process.wait()
        os.unlink(f"{journal}-wal")
        journal.write_bytes(b"not a journal" * 500)
        refused = Node("store", ["--listen", job.endpoint, "--journal", str(journal)], launcher=STORE)
        job._nodes.append(refused)
        ended = refused.end()
        assert ended.code == 1, ended
        assert f"journal {journal}: damaged" in ended.err
        journal.unlink()
        separate_store(job, "--journal", str(journal))
        again = in_one_world(nodes, workers)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)
