"""Which host a failed round is put down to."""

from __future__ import annotations

import pytest

from phalanx.core.quarantine import Offence
from phalanx.core.round_causes import offences_of
from phalanx.core.round_records import Member, MemberList, Result
from phalanx.core.rounds import LeaderView, Options

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
