"""A rendezvous backend as a third party would write one: one value in memory, with a version."""

from __future__ import annotations

import threading
from typing import Any


class MemoryBlob:
    """Shared by the nodes of a test; counts its calls, and fails or loses answers on request."""

    name = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state: bytes | None = None
        self.version = 0
        self.reads = self.writes = 0
        self.broken = False  # every call raises
        self.lose_answers = 0  # so many writes happen, and then raise

    def get_state(self) -> tuple[bytes, Any] | None:
        with self._lock:
            self.reads += 1
            self._check()
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        with self._lock:
            self._check()
            mine = (token or 0) == self.version
            if mine:
                self.writes += 1
                self.state, self.version = state, self.version + 1
                if self.lose_answers:
                    self.lose_answers -= 1
                    raise ConnectionError("the answer was lost")
            return None if self.state is None else (self.state, self.version, mine)

    def _check(self) -> None:
        if self.broken:
            raise ConnectionError("the service is away")
