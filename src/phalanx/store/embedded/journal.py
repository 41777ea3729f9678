"""The store on disk: a snapshot of the model and a log of the calls since, in one sqlite file.

Everything that changed the model in one turn of the server is committed before any of it is
answered, so an answer that a client has received is never lost when the server is killed. Lease clocks
are not kept: opening the journal starts them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from phalanx.core.store_commands import Command
from phalanx.errors import StoreError
from phalanx.store.embedded import wire
from phalanx.store.model import Model

if TYPE_CHECKING:
    import sqlite3

SNAPSHOT_EVERY = 5_000


class Journal:
    """One open journal file; only one server at a time may hold it."""

    def __init__(self, path: str) -> None:
        import sqlite3

        self.path = path
        self._lines = 0
        try:
            self._db: sqlite3.Connection = sqlite3.connect(
                path, isolation_level=None, timeout=0.2, check_same_thread=False
            )
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            # The file survives a killed process as it is; only a crash of the machine may cost the tail.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TABLE IF NOT EXISTS snapshot (store TEXT, state BLOB)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS log"
                " (n INTEGER PRIMARY KEY, session TEXT, lease INTEGER, frame BLOB)"
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"journal {path}: {error}; is another store using it?") from error

    def load(self, model: Model, store: str, now: float) -> str:
        """Bring a fresh model to where the journal ends; returns the store's name (new: `store`)."""
        row = self._db.execute("SELECT store, state FROM snapshot").fetchone()
        if row is None:
            self._snapshot(model, store)
            return store
        model.load(msgspec.msgpack.decode(row[1]), now)
        for session, lease, packed in self._db.execute("SELECT session, lease, frame FROM log ORDER BY n"):
            self._lines += 1
            if lease:
                model.revoke(lease)
            else:
                number, done, body = wire.decode(packed)
                model.apply(session, number, done, body, now)  # type: ignore[arg-type] # we wrote it
        model.renew_all(now)
        return str(row[0])

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
