"""Which host a failed round is put down to."""

from __future__ import annotations

import pytest

from phalanx.core.quarantine import Offence, QuarantinePolicy
from phalanx.core.round_causes import offences_of
from phalanx.core.round_records import (
    HostRecord,
    Member,
    MemberList,
    NodeInfo,
    NodeRecord,
    Result,
    encode,
)
from phalanx.core.rounds import LeaderView, Options, Seen, decide
from phalanx.core.store_commands import Entry, Txn

# Ranks 0 and 1, 2 and 3, 4 and 5.
MEMBERS = tuple(Member(f"{host}.1", 7, host, "", 2, "default") for host in ("a", "b", "c"))
EXIT = Result(False, what="rank 2: exit code 1")
LOST_A_PEER = Result(False, what="rank 0: connection reset", blameless=True)
UNFIT = Result(False, what="no such program", unfit=True)


def hang(*ranks: int) -> Result:
    return Result(False, what="a hang", ranks=ranks)


@pytest.mark.parametrize(
    ("reported", "blamed"),
    [
        ([], []),
        ([("a", Result(True))], []),
        ([("b", EXIT)], [("b", "failure")]),
        ([("b", EXIT), ("a", EXIT)], [("b", "failure")]),  # the first to report; the other follows from it
        ([("a", LOST_A_PEER), ("b", EXIT)], [("b", "failure")]),  # it came second, and is the cause
        ([("a", LOST_A_PEER)], []),  # the cause is unknown
        ([("a", hang(4, 5))], [("c", "failure")]),  # found by one node, due to another
        ([("a", hang(1))], [("a", "failure")]),
        ([("a", hang(1, 4))], []),  # two hosts: neither is known to be the cause
        ([("a", hang(99))], [("a", "failure")]),  # of no member: as if none were named
        ([("c", UNFIT)], [("c", "unfit")]),
        ([("c", UNFIT), ("b", UNFIT), ("a", EXIT)], [("c", "unfit"), ("b", "unfit"), ("a", "failure")]),
        ([("x", EXIT)], []),  # not a member
    ],
)
def test_who_is_the_cause(reported: list[tuple[str, Result]], blamed: list[tuple[str, str]]) -> None:
    view = LeaderView(Options(), 1, members=MemberList("1.1.0", MEMBERS, 3))
    view.results[3] = {f"{host}.1": (mod, result) for mod, (host, result) in enumerate(reported)}
    view.results[2] = {"a.1": (0, EXIT)}  # of an earlier round
    assert [(one.node, one.kind) for one in offences_of(view)] == blamed
    assert all(isinstance(one, Offence) and one.reason for one in offences_of(view))


def test_a_round_with_all_that_goes_with_it_is_one_transaction_of_etcd() -> None:
    """At most 128 operations, and as many conditions."""
    options = Options(min_nodes=1, max_nodes=100, quarantine=QuarantinePolicy(1, 60.0, 60.0))
    view = LeaderView(options, 1, members=MemberList("1.1.0", (), 3), complete=True)
    for number in range(100):
        info = NodeInfo(f"n{number}.1", f"n{number}")
        view.nodes[info.id] = Seen(NodeRecord(info, 1), number + 1, 0.0, 0.0, 7)
        held = Entry("", encode(HostRecord("lost its device", 30.0)), mod=1)
        view.hosts.learn(0.0, f"m{number}", held)
        view.drains.add(f"gone{number}")
    decision = decide(1.0, view, options)
    (txn,) = decision.commands
    assert isinstance(txn, Txn)
    assert decision.reason.startswith("round 1 with 100 nodes")
    assert len(txn.puts) + len(txn.deletes) <= 128
    assert len(txn.when) <= 128
    # All cool-downs end at once.
    (txn,) = decide(31.0, view, options).commands
    assert isinstance(txn, Txn)
    assert 0 < len(txn.deletes) <= 128
