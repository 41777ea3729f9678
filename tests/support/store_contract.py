"""What every store must do, written once: the model, the embedded server and etcd inherit these tests.

A subclass gives the fixture `store`: `request(command)`, `changes(watch, count)` (waits for that many
changes of a watch and returns them) and `second()` (another client of the same store).
"""

from __future__ import annotations

from typing import Protocol

from phalanx.core.rounds.store_commands import (
    Add,
    Change,
    Command,
    Compact,
    Delete,
    Get,
    Grant,
    KeepAlive,
    Put,
    Reply,
    Revoke,
    Txn,
    Unwatch,
    Watch,
    When,
)


class Store(Protocol):
    def request(self, command: Command) -> Reply: ...

    def changes(self, watch: int, count: int) -> list[Change]: ...

    def second(self) -> Store: ...


def told(changes: list[Change]) -> list[tuple[str, bytes, bool]]:
    return [(c.entry.key, c.entry.value, c.deleted) for c in changes]


class StoreContract:
    def test_put_get_and_revisions(self, store: Store) -> None:
        first = store.request(Put("a", b"1"))
        second = store.request(Put("a", b"2"))
        assert second.revision == first.revision + 1
        entry = store.request(Get("a")).entries[0]
        assert (entry.value, entry.create, entry.mod) == (b"2", first.revision, second.revision)
        assert store.request(Get("nothing")).entries == ()

    def test_prefix_reads_in_key_order_and_nothing_else(self, store: Store) -> None:
        for key in ("x/b", "x/a", "xy", "x/a/c"):
            store.request(Put(key, key.encode()))
        found = store.request(Get("x/", prefix=True)).entries
        assert [e.key for e in found] == ["x/a", "x/a/c", "x/b"]

    def test_delete_counts_and_a_new_life_has_a_new_create(self, store: Store) -> None:
        old = store.request(Put("a", b"1")).revision
        assert store.request(Delete("a")).number == 1
        assert store.request(Delete("a")).number == 0
        new = store.request(Put("a", b"2")).revision
        assert store.request(Get("a")).entries[0].create == new > old
        store.request(Put("p/1", b""))
        store.request(Put("p/2", b""))
        assert store.request(Delete("p/", prefix=True)).number == 2

    def test_a_call_that_changes_nothing_has_no_revision(self, store: Store) -> None:
        revision = store.request(Put("a", b"1")).revision
        store.request(Get("a"))
        store.request(Delete("absent"))
        store.request(Txn((When("a", "value", value=b"other"),), (Put("a", b"2"),)))
        assert store.request(Put("a", b"3")).revision == revision + 1

    def test_transaction_on_absence_value_mod_and_create(self, store: Store) -> None:
        absent = Txn((When("k", "mod", 0),), (Put("k", b"1"),))
        made = store.request(absent)
        assert made.ok
        refused = store.request(absent)
        assert not refused.ok
        assert refused.error == "condition"
        assert refused.entries[0].value == b"1"
        by_value = store.request(Txn((When("k", "value", value=b"1"),), (Put("k", b"2"),)))
        assert by_value.ok
        assert not store.request(Txn((When("k", "value", value=b""),), (Put("k", b"9"),))).ok
        assert store.request(Txn((When("k", "mod", by_value.revision),), (Put("k", b"3"),))).ok
        assert store.request(Txn((When("k", "create", made.revision),), (Put("k", b"4"),))).ok
        assert not store.request(Txn((When("k", "mod", made.revision),), (Put("k", b"5"),))).ok
        assert store.request(Get("k")).entries[0].value == b"4"

    def test_transaction_is_one_revision_or_nothing(self, store: Store) -> None:
        store.request(Put("old", b""))
        txn = Txn((When("a", "mod", 0),), (Put("a", b"1"), Put("b", b"2")), (Delete("old"),))
        reply = store.request(txn)
        a, b = store.request(Get("a")).entries[0], store.request(Get("b")).entries[0]
        assert reply.revision == a.mod == b.mod
        assert reply.entries[0] == a
        assert store.request(Get("old")).entries == ()
        lost = store.request(Txn((), (Put("a", b"9"), Put("c", b"3", lease=12345))))
        assert (lost.ok, lost.error) == (False, "lease")
        assert store.request(Get("a")).entries[0].value == b"1"

    def test_add_counts(self, store: Store) -> None:
        assert store.request(Add("n", 5)).number == 5
        assert store.request(Add("n", -7)).number == -2
        assert store.request(Get("n")).entries[0].value == b"-2"
        store.request(Put("word", b"word"))
        assert store.request(Add("word", 1)).error == "number"
        assert store.request(Add("big", 2**63 - 1)).ok
        assert store.request(Add("big", 1)).error == "number"

    def test_a_lease_without_end_is_refused(self, store: Store) -> None:
        for ttl in (0.0, -1.0, float("inf"), float("nan")):
            assert store.request(Grant(ttl)).error == "ttl"

    def test_watch_shows_what_is_there_then_every_change_once(self, store: Store) -> None:
        store.request(Put("w/a", b"1"))
        reply = store.request(Watch(1, "w/", prefix=True))
        assert [e.key for e in reply.entries] == ["w/a"]
        store.request(Put("other", b""))
        store.request(Put("w/b", b"2"))
        store.request(Delete("w/a"))
        store.second().request(Put("w/b", b"3"))
        seen = store.changes(1, 3)
        assert told(seen) == [("w/b", b"2", False), ("w/a", b"", True), ("w/b", b"3", False)]
        revisions = [c.entry.mod for c in seen]
        assert revisions == sorted(set(revisions))

    def test_watch_of_one_key_is_not_a_prefix(self, store: Store) -> None:
        store.request(Watch(1, "k"))
        store.request(Put("kk", b"no"))
        store.request(Put("k", b"yes"))
        assert told(store.changes(1, 1)) == [("k", b"yes", False)]

    def test_watch_from_the_past_replays(self, store: Store) -> None:
        start = store.request(Put("h", b"1")).revision
        store.request(Put("h", b"2"))
        store.request(Delete("h"))
        assert store.request(Watch(1, "h", start=start + 1)).entries == ()
        store.request(Put("h", b"3"))
        assert told(store.changes(1, 3)) == [("h", b"2", False), ("h", b"", True), ("h", b"3", False)]

    def test_watch_from_before_compaction_is_refused(self, store: Store) -> None:
        start = store.request(Put("h", b"1")).revision
        latest = store.request(Put("h", b"2")).revision
        assert store.request(Compact(latest)).ok
        assert store.request(Watch(1, "h", start=start)).error == "compacted"
        assert store.request(Get("h")).entries[0].value == b"2"
        assert store.request(Watch(1, "h", start=latest + 1)).ok

    def test_unwatch(self, store: Store) -> None:
        store.request(Watch(1, "k"))
        store.request(Watch(2, "k"))
        store.request(Unwatch(1))
        store.request(Put("k", b"1"))
        store.changes(2, 1)
        assert store.changes(1, 0) == []

    def test_lease_takes_its_keys_along(self, store: Store) -> None:
        lease = store.request(Grant(30.0)).number
        store.request(Put("l/a", b"1", lease))
        store.request(Put("l/b", b"2", lease))
        store.request(Put("l/b", b"3"))  # no longer on the lease
        store.request(Watch(1, "l/", prefix=True))
        assert store.request(KeepAlive(lease)).ok
        assert store.request(Revoke(lease)).ok
        assert told(store.changes(1, 1)) == [("l/a", b"", True)]
        assert [e.key for e in store.request(Get("l/", prefix=True)).entries] == ["l/b"]
        assert store.request(KeepAlive(lease)).error == "lease"
        assert store.request(Put("l/c", b"", lease)).error == "lease"

    def test_a_lease_comes_with_a_transaction_on_it(self, store: Store) -> None:
        joins = Txn((When("g/a", "mod", 0),), (Put("g/a", b"1"), Put("g/first", b"one", new=True)))
        one = store.request(Grant(30.0, joins))
        assert one.ok
        assert [(e.key, e.lease) for e in one.entries] == [("g/a", one.number)]
        other = store.second().request(Grant(30.0, Txn((), (Put("g/b", b"2"), *joins.puts[1:]))))
        assert other.ok
        found = store.request(Get("g/", prefix=True)).entries
        assert [(e.key, e.value, e.lease) for e in found] == [
            ("g/a", b"1", one.number), ("g/b", b"2", other.number), ("g/first", b"one", one.number),
        ]  # fmt: skip
        late = store.request(Grant(30.0, joins))
        assert (late.error, late.entries[0].value) == ("condition", b"1")
        assert store.request(KeepAlive(late.number)).ok, "a lease all the same"
        store.request(Revoke(one.number))
        assert [e.key for e in store.request(Get("g/", prefix=True)).entries] == ["g/b"]

    def test_lease_ends_by_itself(self, store: Store) -> None:
        lease = store.request(Grant(1.0)).number
        store.request(Put("gone", b"1", lease))
        store.request(Watch(1, "gone"))
        assert told(store.changes(1, 1)) == [("gone", b"", True)]
        assert not store.request(KeepAlive(lease)).ok

    def test_two_leases_are_apart(self, store: Store) -> None:
        one, two = store.request(Grant(30.0)).number, store.second().request(Grant(30.0)).number
        assert one != two
        store.request(Put("1", b"", one))
        store.request(Put("2", b"", two))
        store.request(Revoke(one))
        assert store.request(Get("1")).entries == ()
        assert store.request(Get("2")).entries[0].lease == two
