"""The schema has the fields of the values that fill it."""

from __future__ import annotations

from phalanx.core.ledger.goodput import CATEGORIES, GoodputTotals
from phalanx.core.ledger.incidents import Incident
from phalanx.observe.snapshot import IncidentSnapshot, LedgerSnapshot


def test_an_incident_has_the_same_fields() -> None:
    assert IncidentSnapshot.__struct_fields__ == Incident._fields
    made = IncidentSnapshot(**Incident(3, "rank 1 failed", rank=1).as_dict())
    assert (made.number, made.reason, made.rank, made.recovery) == (3, "rank 1 failed", 1, "restart")


def test_a_ledger_has_the_fields_of_the_totals() -> None:
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    idle = LedgerSnapshot(**GoodputTotals(2, seconds, {}).as_dict())
    assert (idle.goodput is None) != (idle.uptime is None)
    busy = LedgerSnapshot(
        **GoodputTotals(2, {**seconds, "productive": 3.0}, {1: {"starting": 1.0}}).as_dict()
    )
    assert (busy.ranks, busy.goodput, busy.lost) == (2, 1.0, {"1": {"starting": 1.0}})
