"""The settings of a rendezvous: the store's address, this node's name and rank, the time-outs.

The node that can bind the endpoint's address hosts the store, and all others are clients; `is_host` in
--rdzv-conf overrules that, and node 0 hosts the store of a static job. No reverse look-ups: they can hang.
"""

from __future__ import annotations

import os

from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.quarantine import QuarantinePolicy, parse_policy
from phalanx.core.rounds.records import NodeInfo
from phalanx.errors import StoreError, UsageError
from phalanx.job.environment import DEFAULT_QUARANTINE, ETCD_PORT, STATIC_PORT, STORE_PORT, node_index
from phalanx.job.time_budgets import LEASE, LINGER, RETURN, STORE_GRACE
from phalanx.job.units import duration, format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.store.embedded.blob_client import CompareAndSetBlob
    from phalanx.store.embedded.server import Server
    from phalanx.store.net.tls import Tls
    from phalanx.store.net.token import Token

DEFAULT_TIMEOUT = 600.0


class Settings:
    """Everything about this node's part in the rendezvous, checked.

    `store` is where the job's store is: "embedded" (an agent hosts it), "etcd", or "blob" (in the value of a
    third party's backend, which is `blob`)."""

    def __init__(self, params: RendezvousParameters, blob: CompareAndSetBlob | None = None) -> None:
        from phalanx.job.address import parse_rendezvous_endpoint

        self.backend = params.backend
        self.endpoint = params.endpoint
        self.blob = blob
        self.store = "blob" if blob is not None else "etcd" if params.backend == "etcd" else "embedded"
        self.fixed = params.backend == "static" and blob is None
        if self.store == "blob":
            self.host, self.port = "", 0
        elif self.store == "etcd":  # may have several endpoints, written as URLs
            first = params.endpoint.partition(",")[0].rpartition("://")[2].rstrip("/")
            self.host, self.port = parse_rendezvous_endpoint(first, ETCD_PORT)
        else:
            port = STATIC_PORT if self.fixed else STORE_PORT
            self.host, self.port = parse_rendezvous_endpoint(params.endpoint, port)
            if self.port == 0 and params.max_nodes > 1:
                raise UsageError(
                    f"--rdzv-endpoint {params.endpoint}: nodes can only meet at a port that all know, not 0"
                )
        self.name_known = True  # whether the host's name had an address when it was last looked up
        self.params = params
        self.run_id = params.run_id
        self.local_addr = params.local_addr
        self.rank = params.get_as_int("rank", -1) or 0
        self.is_host = self.rank == 0 if self.fixed else params.get_as_bool("is_host")
        self.journal: str | None = params.get("journal")
        # Nodes cannot tell the death of a store from a cut: one that may come back shortens no lease.
        self.linger = _seconds(params, "linger", float("inf") if self.journal else LINGER)
        self.name = str(params.get("name") or os.uname().nodename)
        self.token_file: str | None = params.get("token_file")
        self.quarantine_dir, self.quarantine_hook = (
            str(params.get(name) or "") for name in ("quarantine_dir", "quarantine_hook")
        )
        self._tls = tuple(str(params.get(f"tls_{what}") or "") for what in ("cert", "key", "ca"))
        beats, tries = params.get("keep_alive_interval"), params.get("keep_alive_max_attempt")
        ttl = LEASE
        if beats is not None or tries is not None:
            ttl = _seconds(params, "keep_alive_interval", 5.0) * (
                params.get_as_int("keep_alive_max_attempt", 3) or 3
            )
        # For node 0 of a static job to come back, once a round has run.
        self.return_timeout = _seconds(params, "return_timeout", RETURN)
        self.cas_backoff = _seconds(params, "cas_backoff_max_seconds", 0.0)
        self.options = Options(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            all_nodes=params.get_as_int("all_nodes", 0) or 0,
            join_timeout=_seconds(params, "join_timeout", _seconds(params, "timeout", DEFAULT_TIMEOUT)),
            last_call=_seconds(params, "last_call_timeout", 2.0),
            settle=_seconds(params, "settle", 0.2),
            ttl=_seconds(params, "ttl", ttl),
            linger=self.linger,
            store_grace=_seconds(params, "store_grace", STORE_GRACE),
            fixed=self.fixed,
            prefix=f"job/{self.run_id}/",
            quarantine=_quarantine(params),
        )
        if self.options.ttl <= self.linger < float("inf"):
            raise UsageError(
                f"--rdzv-conf ttl={format_duration(self.options.ttl)}: a lease must outlast "
                f"linger={format_duration(self.linger)}"
            )

    @property
    def where(self) -> str:
        """The endpoint as people write it."""
        if self.blob is not None:
            return f"the rendezvous backend {self.backend!r}"
        if self.store == "etcd":
            return self.endpoint
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def host_name(self) -> str:
        """The host of the store, for people."""
        if self.blob is not None:
            return self.where
        return f"node 0 at {self.where}" if self.fixed else f"the store at {self.where}"

    @property
    def tls(self) -> Tls | None:
        """The files for TLS, if TLS is asked for."""
        if not any(self._tls):
            return None
        from phalanx.store.net.tls import Tls

        return Tls(*self._tls)

    def node(self, slots: int, role: str) -> NodeInfo:
        """This node, under an id that is new for each incarnation."""
        unique = f"{self.name}.{os.getpid()}.{os.urandom(3).hex()}"
        return NodeInfo(unique, self.name, self.address(), slots, role, self.rank, node_index())

    def address(self) -> str:
        """The address other nodes reach this one by: given, or of the interface towards the endpoint."""
        if self.blob is not None and not self.local_addr:
            from phalanx.job.address import own_address

            return own_address()
        return self.local_addr or _source_address(self.host if self.name_known else "", self.port)

    def addresses(self) -> list[str]:
        """The addresses of the endpoint's name, for people."""
        import socket

        if not self.name_known:
            return [f"{self.host} (no address)"]
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            return [f"{self.host} (no address: {error.strerror})"]
        return list(dict.fromkeys(str(address[4][0]) for address in found))


def _seconds(params: RendezvousParameters, key: str, default: float) -> float:
    value = params.get(key)
    if value is None:
        return default
    try:
        seconds = duration(value) if isinstance(value, str) else float(value)
        if not 0 <= seconds < float("inf"):
            raise ValueError("must be 0 or more")
    except (TypeError, ValueError) as error:
        raise UsageError(f"--rdzv-conf {key}={value}: {error}") from None
    return seconds


def _quarantine(params: RendezvousParameters) -> QuarantinePolicy | None:
    text = str(params.get("quarantine") or DEFAULT_QUARANTINE)
    try:
        return parse_policy(text)
    except ValueError as error:
        raise UsageError(f"--rdzv-conf quarantine={text}: {error}") from None


def _source_address(host: str, port: int) -> str:
    """The address this machine would use towards the endpoint; connecting a datagram socket sends nothing."""
    import socket

    from phalanx.job.address import is_loopback, names_loopback

    # The second is from the block for documentation: the route to it is the default route.
    for target in (host, "192.0.2.1"):
        try:
            family, kind, proto, _, where = socket.getaddrinfo(target, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(where)
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(found) or names_loopback(host):
            return found
        if target == host and not _is_any(host):
            return host  # a name of this machine that the other nodes know
    return os.uname().nodename


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::", "*")


def open_server(
    settings: Settings,
    token: Token | None,
    on_failure: Callable[[str], None] = lambda text: None,
    on_refused: Callable[[str, str], None] = lambda host, why: None,
) -> Server | None:
    """The embedded store, if this node hosts it; where its name has no address yet, at all addresses."""
    import errno

    from phalanx.job.address import listening_address
    from phalanx.store.embedded.server import Server

    if settings.is_host is False:
        return None
    try:
        return Server(
            listening_address(settings.host) if settings.name_known else "0.0.0.0",
            settings.port,
            token=token,
            linger=settings.linger,
            journal=settings.journal,
            tls=settings.tls,
            on_failure=on_failure,
            on_refused=on_refused,
        )
    except StoreError as error:
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        held = "locked" in str(cause)  # the journal, by another agent on this machine
        elsewhere = number in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) or held or _unresolved(cause)
        if settings.is_host or not elsewhere:
            raise
        return None


def _unresolved(error: BaseException | None) -> bool:
    """A name that does not resolve yet: the node that has it hosts the store, and clients try again."""
    import socket

    return isinstance(error, socket.gaierror)
