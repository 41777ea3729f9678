"""The store that this node serves for its job, or does not: who hosts it is decided here.

The node that has the endpoint's address does, or node 0 of a static job (on MASTER_PORT, beside the workers'
store). A name that DNS does not know yet is looked up meanwhile, and hosted if it proves to be this node's. A
pod without a token waits for one.
"""

from __future__ import annotations

from phalanx.cluster.clock import clock
from phalanx.cluster.settings import open_server
from phalanx.core.rounds.participant_events import Remark
from phalanx.errors import StoreAuthError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.master_port import MasterPort
    from phalanx.cluster.mismatches import Mismatches
    from phalanx.cluster.name_lookup import NameLookup
    from phalanx.cluster.settings import Settings
    from phalanx.cluster.waiting_line import StatusLine
    from phalanx.store.embedded.server import Server
    from phalanx.store.net.token import Token

_LOOKUP_PATIENCE = 3.0  # for the first answer to a question for the host's name
_SECRET_PAUSE = 1.0  # a Secret that is mounted late appears as a file
NO_SECRET = (
    "no token that all pods of the job have: mount a Secret and name its file with PHALANX_TOKEN_FILE "
    "(`phalanx k8s manifest` writes both)"
)
NOT_AUTHENTICATED = (
    "control traffic of this job is not authenticated (no PHALANX_TOKEN); "
    "to authenticate it, set PHALANX_TOKEN to the same secret on every node"
)


class StoreHost:
    """`hosting`: this node serves the store."""

    def __init__(
        self,
        settings: Settings,
        post: Callable[[Callable[[], None]], None],
        mismatches: Mismatches,
        line: StatusLine,
        on_lost: Callable[[str], None],
    ) -> None:
        """`on_lost`: the store here has failed."""
        self._settings, self._post, self._mismatches, self._line = settings, post, mismatches, line
        self._on_lost = on_lost
        self.hosting = False
        self.token: Token | None = None
        self._server: Server | MasterPort | None = None
        self._master: MasterPort | None = None
        self._lookup: NameLookup | None = None
        self._asked_at = clock()
        self._secret_at: float | None = None  # when to look for a token again
        self._unnamed_at: float | None = None  # when a name that is being looked up counts as not known yet
        self._patience: float | None = None  # for a connection that can be opened now

    @property
    def address(self) -> tuple[str, int] | None:
        """Where node 0 of a static job reaches its own store."""
        return self._master.address if self._master is not None else None

    @property
    def shows_token(self) -> bool:
        """Whether the clients of the store have proved who they are."""
        return self.token is not None or self._settings.store != "embedded"

    def open(self) -> str:
        """Find the token, and serve the store if this node is to; why that is not possible, or empty."""
        self._secret_at = None
        if awaits_secret(self._settings):
            now = clock()
            left = self._asked_at + self._settings.options.join_timeout - now
            if left <= 0:
                return NO_SECRET
            self._secret_at = now + min(left, _SECRET_PAUSE)
            self._line.learn(f"{NO_SECRET}, {left:.0f} s left", now)
            return ""
        self.token = find_secret(self._settings)
        if self._settings.store == "embedded" and self._settings.is_host is not False:
            from phalanx.cluster.name_lookup import NameLookup, needs_lookup

            if needs_lookup(self._settings.host):
                self._lookup = NameLookup(
                    self._settings.host, lambda known: self._post(lambda: self._looked_up(known))
                )
                self._unnamed_at = clock() + _LOOKUP_PATIENCE
                self._line.learn(f"looking up {self._settings.host}", clock())
                return ""
            self._serve()
        self._patience = self._settings.options.join_timeout
        return ""

    def dialled(self) -> float | None:
        """For how long to look for the store, once, when that can begin."""
        patience, self._patience = self._patience, None
        return patience

    @property
    def due(self) -> tuple[float | None, ...]:
        """When to call `tick`."""
        return self._secret_at, self._unnamed_at

    def tick(self, now: float) -> str:
        """Time has passed; what `open` returns."""
        if self._unnamed_at is not None and now >= self._unnamed_at:
            self._looked_up(False)
        return self.open() if self._secret_at is not None and now >= self._secret_at else ""

    def _looked_up(self, known: bool) -> None:
        """The host's name has an address, or does not have one yet: it is looked up until it has."""
        if self._lookup is None:
            return
        first, self._unnamed_at = self._unnamed_at is not None, None
        self._settings.name_known = known
        if known or self._settings.is_host:
            self._lookup.stop()
            if self._server is None:
                self._serve()
        if first:
            left = self._asked_at + self._settings.options.join_timeout - clock()
            self._patience = max(1.0, left)

    def _serve(self) -> None:
        self._server = self._opened()
        if self._server is not None:
            self._server.start()
            self.hosting = True
            self._settings.port = self._server.address[1]  # where 0 was asked for

    def _opened(self) -> Server | MasterPort | None:
        def failed(why: str) -> None:
            self._post(lambda: self._on_lost(why))

        def refused(host: str, why: str) -> None:
            self._post(lambda: self._mismatches.refused(host, why))

        if not self._settings.fixed:
            return open_server(self._settings, self.token, failed, refused)
        if not self._settings.is_host:
            return None
        from phalanx.cluster.master_port import MasterPort

        def visited(host: str) -> None:
            self._post(lambda: self._mismatches.visited(host))

        self._master = MasterPort(self._settings, self.token, failed, refused, visited)
        self._settings.port = self._master.address[1]
        if self.token is None:
            self._mismatches.remark(Remark(NOT_AUTHENTICATED))
        return self._master

    def new_round(self, shared: bool) -> int | None:
        """Empty the workers' store on MASTER_PORT; its port, None where this node does not serve one."""
        return self._master.new_round(shared) if self._master is not None else None

    def stop_looking(self) -> None:
        """Neither a name nor a token is needed any more."""
        self._secret_at = self._unnamed_at = self._patience = None
        if self._lookup is not None:
            self._lookup.stop()
            self._lookup = None

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()


def find_secret(settings: Settings) -> Token | None:
    """The agents' token; other stores have their own means, and a static job only a given token."""
    if settings.store != "embedded":
        return None
    from phalanx.job.environment import TOKEN_FILE, variables
    from phalanx.store.net.token import find_token, given_token

    environ = {TOKEN_FILE: settings.token_file} if settings.token_file else variables()
    return given_token(environ) if settings.fixed else find_token(environ)


def awaits_secret(settings: Settings) -> bool:
    """Whether this node has no token that the others could have, too, and should not make one.

    The pods of a job have homes of their own. Where one made a token there, the others would be refused,
    and it would train alone if --nnodes allows that."""
    from phalanx.job.environment import in_pod, variables
    from phalanx.store.net.token import find_token, given_token

    if settings.store != "embedded" or settings.fixed or settings.options.max_nodes == 1 or not in_pod():
        return False
    if settings.token_file or given_token(variables()) is not None:
        return False
    try:
        find_token(make=False)
    except StoreAuthError:
        return True
    return False
