"""What `phalanx status` prints, for jobs in all sorts of states."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.group.group import Phase
from phalanx.observe.snapshot import JobSnapshot
from phalanx.observe.status_text import PHASES, format_job, format_status


def worker(rank: int, **more: Any) -> dict[str, Any]:
    plain = {"running": True, "ready": False, "step": None, "rate": None, "quiet": None, "section": ""}
    return {"rank": rank, "local_rank": rank, "pid": 100 + rank, **plain, **more}


def answer(**more: Any) -> dict[str, Any]:
    """What an agent answers."""
    return {
        "run": "job7",
        "name": "train.py",
        "host": "node-a",
        "pid": 42,
        "since": 1000.0,
        "now": 1090.0,
        "phase": "RUNNING",
        "waiting_for": "",
        "round": 1,
        "nodes": ["node-a"],
        "node": 0,
        "restarts": 0,
        "max_restarts": 3,
        "world_size": 2,
        "workers": [worker(0), worker(1)],
        "standbys": {"count": 0, "pids": [], "memory": 0},
        "slow": [],
        "hangs": [],
        "incidents": [],
        "logs": "",
        **more,
    }


def job(**more: Any) -> JobSnapshot:
    return msgspec.convert(answer(**more), JobSnapshot)


def test_a_job_of_which_nothing_special_is_known() -> None:
    assert format_status(job()) == (
        "train.py (run job7) on node-a, pid 42, running for 90.0 s, world size 2\n"
        "  rank  pid  state\n"
        "  0     100  running\n"
        "  1     101  running"
    )


def test_everything_there_is_to_tell() -> None:
    told = format_status(
        job(
            nodes=["node-a", "node-b"],
            node=1,
            round=4,
            restarts=1,
            workers=[
                worker(2, ready=True, step=12, rate=1.25, quiet=0.32, section="load"),
                worker(3, running=False),
            ],
            standbys={"count": 2, "pids": [7, 8], "memory": 3_400_000_000},
            slow=["rank 2 is slow"],
            hangs=["rank 3 hung"],
            incidents=[{"at": 1080.0, "what": "rank 2 is slow"}, {"at": 1085.0, "what": "lost node-c"}],
            logs="/logs/job7_x",
        ),
        width=200,
    )
    assert told.splitlines() == [
        "train.py (run job7) on node-a, pid 42, running for 90.0 s, restart 1 of 3, "
        "node 2 of 2 (node-a node-b), round 4, world size 2",
        "  rank  pid  state  step  steps/s  last beat  section",
        "  2     102  ready  12    1.25     0.3 s ago  load",
        "  3     103  ended",
        "  2 standbys, 3.4 GB",
        "  slow: rank 2 is slow",
        "  hang: rank 3 hung",
        "  5.00 s ago: lost node-c",
        "  logs: /logs/job7_x",
    ]


def test_the_nodes_of_other_machines_are_shown_and_the_silent_ones_counted() -> None:
    other = answer(
        host="node-b",
        workers=[worker(2, state="checkpointing", cpu=0.5, memory=2_000_000)],
        ledger={"ranks": 1, "goodput": 0.75, "seconds": {"productive": 3.0, "starting": 1.0}, "lost": {}},
    )
    told = format_job(job(peers=[other], silent=2)).split("\n\n")
    assert [one.partition(",")[0] for one in told[:2]] == [
        "train.py (run job7) on node-a",
        "train.py (run job7) on node-b",
    ]
    assert told[1].splitlines()[1:] == [
        "  rank  pid  state          cpu   memory",
        "  2     102  checkpointing  0.50  2 MB",
        "  goodput 75.0 %",
    ]
    assert told[2] == "2 nodes did not answer"
    assert format_job(job(peers=[answer()] * 70)).endswith("\n\n6 more nodes have answered (--json)")


def test_a_node_that_waits_says_what_for() -> None:
    waiting = job(
        phase="JOINING", waiting_for="1 of 2 nodes here, 36 s left", workers=[], nodes=[], world_size=-1
    )
    assert format_status(waiting) == (
        "train.py (run job7) on node-a, pid 42, 1 of 2 nodes here, 36 s left (90.0 s so far)"
    )


def test_lines_fit_the_terminal() -> None:
    told = format_status(job(hangs=["x" * 500]), width=60)
    assert max(map(len, told.splitlines())) == 60
    assert told.splitlines()[-1].endswith("x…")


def test_every_phase_has_words() -> None:
    assert set(PHASES) == {phase.value for phase in Phase}
