"""The store on disk: a snapshot of the model and a log of the calls since, in one sqlite file.

Everything that changed the model in one turn of the server is on the disk before any of it is answered, so an
answer that a client has seen is lost neither with the process nor with the machine. Lease clocks are not
kept: opening the journal starts them again.

A disk may lie, and a person may put back an old copy. Therefore each opening (an incarnation of the server)
is noted with the revision at which it began. A client that has seen a later revision of an incarnation than
the journal has, or an incarnation that it does not have, proves that changes were lost (`has_lost`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from phalanx.core.rounds.store_commands import Command
from phalanx.errors import StoreError
from phalanx.store.model import Model
from phalanx.store.net import wire

if TYPE_CHECKING:
    import sqlite3

SNAPSHOT_EVERY = 5_000
_INCARNATIONS = 1_000  # those that are remembered


class Journal:
    """One open journal file; only one server at a time may hold it."""

    def __init__(self, path: str) -> None:
        import sqlite3

        self.path = path
        self.epoch = 1
        self.incarnation = os.urandom(8).hex()
        self._began: dict[str, int] = {}  # incarnation -> the revision at its beginning, in order
        self._lines = 0
        self._has_begun_epoch = False
        try:
            # sqlite would follow the umask.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreError(f"journal {path}: {error.strerror}") from error
        try:
            self._db: sqlite3.Connection = sqlite3.connect(
                path, isolation_level=None, timeout=0.2, check_same_thread=False
            )
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A commit waits for the disk: NORMAL would let a crash of the machine take back answers.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TABLE IF NOT EXISTS snapshot (store TEXT, state BLOB)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS log"
                " (n INTEGER PRIMARY KEY, session TEXT, lease INTEGER, frame BLOB)"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS epoch (epoch INTEGER)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS incarnation (n INTEGER PRIMARY KEY, id TEXT, began INTEGER)"
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(f"journal {path}: {error}; is another store using it?") from error
            raise self._damaged(error) from error

    def load(self, model: Model, store: str, now: float) -> str:
        """Bring a fresh model to where the journal ends; returns the store's name (new: `store`)."""
        import sqlite3

        first_lease = model.next_lease
        try:
            store = self._replay(model, store, now)
            row = self._db.execute("SELECT epoch FROM epoch").fetchone()
            self.epoch = row[0] if row else 1
            self._began = dict(self._db.execute("SELECT id, began FROM incarnation ORDER BY n"))
        except (sqlite3.Error, StoreError, LookupError, TypeError, ValueError) as error:
            raise self._damaged(error) from error
        model.begin_incarnation(first_lease)
        self._began[self.incarnation] = model.revision
        self._snapshot(model, store)
        return store

    def _damaged(self, error: Exception) -> StoreError:
        return StoreError(
            f"journal {self.path}: damaged ({error}); move it away: the store then starts empty, and jobs "
            "that wait for it form again"
        )

    def _replay(self, model: Model, store: str, now: float) -> str:
        row = self._db.execute("SELECT store, state FROM snapshot").fetchone()
        if row is None:
            return store
        model.load(msgspec.msgpack.decode(row[1]), now)
        for session, lease, packed in self._db.execute("SELECT session, lease, frame FROM log ORDER BY n"):
            if lease:
                model.revoke(lease)
            else:
                number, done, body = wire.decode(packed)
                model.apply(session, number, done, body, now)  # type: ignore[arg-type] # we wrote it
        model.renew_all(now)
        return str(row[0])

    def has_lost(self, incarnation: str, revision: int) -> bool:
        """Whether a client that has seen this revision of this incarnation has seen more than there is."""
        known = list(self._began)
        # A journal goes back between two servers: what this one has found out covers all that was lost, and
        # clients of any earlier incarnation learn of it by the epoch, which they have not seen yet.
        if incarnation == self.incarnation or self._has_begun_epoch:
            return False
        if incarnation not in self._began:
            return len(known) < _INCARNATIONS  # else it may just be forgotten
        return revision > self._began[known[known.index(incarnation) + 1]]

    def begin_epoch(self, model: Model, store: str, lost: str) -> None:
        """Changes of an incarnation were lost: what was seen before now belongs to an earlier epoch."""
        self.epoch += 1
        self._has_begun_epoch = True
        model.begin_epoch()
        # Nor do clients of that incarnation begin another one after a restart of this server.
        del self._began[self.incarnation]
        self._began = dict.fromkeys([*self._began, lost, self.incarnation], model.revision)
        self.commit(model, store)
        self._snapshot(model, store)

    def begin(self) -> None:
        """Open a turn, if none is open."""
        if not self._db.in_transaction:
            self._write("BEGIN IMMEDIATE")

    def record(self, session: str, number: int, done: int, command: Command) -> None:
        """A call that changed something."""
        self.begin()
        frame = wire.encode(number, done, command)[wire.HEADER :]
        self._write("INSERT INTO log (session, lease, frame) VALUES (?, 0, ?)", (session, frame))
        self._lines += 1

    def record_expiry(self, lease: int) -> None:
        """A lease that the store ended by itself."""
        self.begin()
        self._write("INSERT INTO log (session, lease, frame) VALUES ('', ?, NULL)", (lease,))
        self._lines += 1

    def commit(self, model: Model, store: str) -> None:
        """Make the turn last; now and then fold the log into a snapshot."""
        if self._db.in_transaction:
            self._write("COMMIT")
            if self._lines >= SNAPSHOT_EVERY:
                self._snapshot(model, store)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _snapshot(self, model: Model, store: str) -> None:
        self._write("BEGIN IMMEDIATE")
        self._write("DELETE FROM snapshot")
        self._write("INSERT INTO snapshot VALUES (?, ?)", (store, msgspec.msgpack.encode(model.dump())))
        self._write("DELETE FROM log")
        self._write("DELETE FROM epoch")
        self._write("INSERT INTO epoch VALUES (?)", (self.epoch,))
        self._write("DELETE FROM incarnation")
        for one in list(self._began.items())[-_INCARNATIONS:]:
            self._write("INSERT INTO incarnation (id, began) VALUES (?, ?)", one)
        self._write("COMMIT")
        self._lines = 0

    def _write(self, statement: str, values: tuple[object, ...] = ()) -> None:
        import sqlite3

        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreError(
                f"journal {self.path}: {error}; put that right and start the store again, jobs wait for it"
            ) from error
