"""Which host a failed round is put down to."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.core.rounds.causes import offences_of
from phalanx.core.rounds.leader_view import LeaderView, Options, Seen
from phalanx.core.rounds.quarantine import Offence, QuarantinePolicy
from phalanx.core.rounds.records import (
    ACTIVE,
    FORMING,
    HostRecord,
    Member,
    MemberList,
    NodeInfo,
    NodeRecord,
    Result,
    Round,
    encode,
)
from phalanx.core.rounds.rounds import decide
from phalanx.core.rounds.store_commands import Change, Entry, Txn

# Ranks 0 and 1, 2 and 3, 4 and 5.
MEMBERS = tuple(Member(f"{host}.1", 7, host, "", 2, "default") for host in ("a", "b", "c"))
EXIT = Result(False, what="rank 2: exit code 1")
LOST_A_PEER = Result(False, what="rank 0: connection reset", blameless=True)
ECC = Result(False, what="rank 4: RuntimeError: CUDA error: uncorrectable ECC error encountered ...")
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
        ([("c", ECC)], [("c", "device")]),
        ([("a", EXIT), ("c", ECC)], [("c", "device")]),  # the first one lost a peer, in words of its own
        ([("a", UNFIT), ("c", ECC), ("b", ECC)], [("a", "unfit"), ("c", "device"), ("b", "device")]),
    ],
)
def test_who_is_the_cause(reported: list[tuple[str, Result]], blamed: list[tuple[str, str]]) -> None:
    view = active(MEMBERS)
    view.results[3] = {f"{host}.1": (mod, result) for mod, (host, result) in enumerate(reported)}
    view.results[2] = {"a.1": (0, EXIT)}  # of an earlier round
    assert [(one.node, one.kind) for one in offences_of(view)] == blamed
    assert all(isinstance(one, Offence) and one.reason for one in offences_of(view))


GOING = {"leaving": "SIGTERM"}


@pytest.mark.parametrize(
    ("gone", "reported", "blamed"),
    [
        pytest.param({"c": {}}, [], ["c"], id="vanished"),
        pytest.param({"c": {}}, [("a", LOST_A_PEER)], ["c"], id="its-peers-noticed-first"),
        pytest.param({"c": {}}, [("a", EXIT)], ["c"], id="in-words-that-are-not-recognized"),
        pytest.param({"c": {}}, [("c", EXIT)], ["c"], id="reported-and-vanished"),
        pytest.param({"c": {}}, [("c", EXIT), ("b", EXIT)], ["c"], id="the-first-report"),
        pytest.param({"c": {}}, [("c", LOST_A_PEER), ("b", EXIT)], ["b"], id="it-only-lost-a-peer"),
        pytest.param({"c": {}}, [("c", Result(True))], [], id="vanished-after-success"),
        pytest.param({"c": {}}, [("b", UNFIT)], ["b", "c"], id="beside-one-that-is-unfit"),
        pytest.param({"c": GOING}, [], [], id="left"),
        pytest.param({"c": {**GOING, "preempted": True}}, [], [], id="preempted"),
        pytest.param({"c": GOING}, [("b", EXIT)], ["b"], id="left-after-a-failure"),
        pytest.param({"b": {}, "c": {}}, [], [], id="most-of-them"),
        pytest.param({"b": {}, "c": GOING}, [], ["b"], id="one-of-those-that-went"),
    ],
)
def test_a_lost_node(
    gone: dict[str, dict[str, Any]], reported: list[tuple[str, Result]], blamed: list[str]
) -> None:
    view = active(MEMBERS)
    view.results[3] = {f"{host}.1": (mod, result) for mod, (host, result) in enumerate(reported)}
    for host, record in gone.items():
        vanish(view, f"{host}.1", **record)
    assert [one.node for one in offences_of(view)] == blamed
    # As another leader finds it, which was elected after the next round was begun.
    if not reported and blamed:
        (begun,) = decide(5.0, view, view.options).commands
        assert isinstance(begun, Txn)
        after = LeaderView(Options(), 1)
        changes = [Change(Entry(put.key, put.value, mod=50)) for put in begun.puts]
        members = Change(Entry("members", encode(view.members), mod=9))
        after.learn(6.0, (*changes, members), reset=True)
        assert [one.node for one in offences_of(after)] == blamed


def active(members: tuple[Member, ...], **more: Any) -> LeaderView:
    """A leader's view of these members in an active round."""
    current = Round(3, ACTIVE, len(members), term=1, stamp="1.1.0")
    view = LeaderView(Options(max_nodes=len(members)), 1, round=current, complete=True, **more)
    view.members = MemberList("1.1.0", members, 3)
    for m in members:
        view.nodes[m.id] = Seen(NodeRecord(NodeInfo(m.id, m.name), 3, rounds=3), 7, 0.0, 0.0, 7)
    return view


def vanish(view: LeaderView, node: str, **record: Any) -> None:
    """The node's last record, and that it is gone: in one notice, as a busy leader reads it."""
    last = encode(view.nodes[node].record._replace(**record))
    going = Entry(f"node/{node}", last, create=7, mod=20, lease=7)
    view.learn(4.0, (Change(going), Change(Entry(f"node/{node}", mod=21), deleted=True)))


def test_a_lost_node_that_nobody_saw_go() -> None:
    """The store was away, the node had stopped its workers, or all was read anew: nobody is blamed."""
    view = active(MEMBERS, unsure_until=10.0)
    vanish(view, "c.1")
    assert offences_of(view) == []
    view = active(MEMBERS)
    view.round = Round(4, FORMING, term=1)
    vanish(view, "c.1", ready=4)
    assert offences_of(view) == []
    view = active(MEMBERS)
    view.drains.add("c.1")
    vanish(view, "c.1")
    assert offences_of(view) == []
    view = active(MEMBERS)
    rest = [Change(Entry(f"node/{h}.1", encode(view.nodes[f"{h}.1"].record), 7, 7, 7)) for h in "ab"]
    round_ = Change(Entry("ctl/round", encode(view.round), mod=5))
    view.learn(4.0, (*rest, round_), reset=True)
    assert offences_of(view) == []


def test_many_lost_nodes_of_a_large_job_are_not_each_the_cause() -> None:
    many = tuple(Member(f"n{number}.1", 7, f"n{number}", "", 1, "default") for number in range(100))
    for lost, blamed in ((10, 10), (11, 0), (60, 0)):
        view = active(many)
        for number in range(lost):
            vanish(view, f"n{number}.1")
        assert len(offences_of(view)) == blamed
        (begun,) = decide(5.0, view, view.options).commands
        assert isinstance(begun, Txn)
        assert len(begun.puts[0].value) < 1000


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
