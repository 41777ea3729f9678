"""`phalanx drain NODE|RUN|--self`: let a node leave a running job; the others re-form without it.

Returns when the node has left, or reports why it cannot know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from phalanx.cli.parser import TRUST, Parser
from phalanx.cli.runs import add_all_users
from phalanx.cli.store import trust
from phalanx.core.rounds.records import NodeRecord, decode_node
from phalanx.core.rounds.store_commands import Get, Notice, Put
from phalanx.errors import PhalanxError, StoreError, UsageError
from phalanx.job.environment import STORE_PORT, variables
from phalanx.job.units import format_duration
from phalanx.log import printable
from phalanx.observe.local_agents import FIND

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from phalanx.store.client import StoreClient

BACKENDS = ("phalanx", "c10d", "etcd")


def main(argv: Sequence[str]) -> int:
    """Ask, and wait until the node has left."""
    options = make_parser().parse_args(argv)
    if bool(options.node) == options.self:
        raise UsageError("name one node, or --self for the nodes of this machine")
    if options.node and not options.rdzv_endpoint:
        from phalanx.cli.control import leave
        from phalanx.cli.runs import fitting, local_agents

        agents = local_agents("drain", options.all_users)
        here = fitting(agents, options.node) or [one for one in agents if one.job.host == options.node]
        if here:
            return leave(here, options.node)
    conf = settings_of(options)
    name = str(conf.get("name") or os.uname().nodename) if options.self else options.node
    try:
        with store_client(options, conf) as client:
            return drain(client, options.rdzv_id, name, options.timeout)
    except PhalanxError as error:
        if isinstance(error, ValueError):
            raise
        named = options.node and not options.rdzv_endpoint
        where = f"no node or run of this machine answers to {printable(name)}; " if named else ""
        raise PhalanxError(f"{where}{error}") from None


def settings_of(options: Namespace) -> dict[str, str]:
    """--rdzv-conf, of a backend that has a store which these commands know."""
    from phalanx.job.config import Sources

    if options.rdzv_backend not in BACKENDS:  # from the variable; argparse checks arguments only
        raise UsageError(
            f"PET_RDZV_BACKEND={options.rdzv_backend}: nodes leave {', '.join(BACKENDS)} jobs only"
        )
    return Sources({"rdzv_conf": options.rdzv_conf}, {}).settings()


def store_client(options: Namespace, conf: Mapping[str, str]) -> StoreClient:
    """A client of the job's store, found as `phalanx run` finds it."""
    from phalanx.store.embedded.client import Client

    # Without an endpoint, the store is on this machine, which is not slow to answer.
    grace = min(10.0 if options.rdzv_endpoint else FIND, options.timeout)
    if options.rdzv_backend == "etcd":
        from phalanx.store.etcd.client import etcd_client_from

        files = {name: getattr(options, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        return etcd_client_from(options.rdzv_endpoint, {**files, **conf}, grace=grace)
    from phalanx.job.address import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, STORE_PORT)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    token, tls = trust(options)
    return Client(host, port, token=token, tls=tls, grace=grace)


def drain(client: StoreClient, run_id: str, name: str, timeout: float) -> int:
    """Ask every node of that name or id to leave, and wait until none is left."""
    import threading

    prefix = f"job/{run_id}/"
    nodes = _nodes(client, prefix)
    chosen = {node for node, record in nodes.items() if name in (node, record.info.name)}
    if not chosen:
        there = " ".join(sorted(record.info.name for record in nodes.values())) or "none"
        raise StoreError(f"{name}: no such node in run {run_id}; there are: {there}")
    changed = threading.Event()

    def noticed(_notice: Notice) -> None:
        changed.set()

    client.watch(prefix + "node/", noticed, prefix=True)
    for node in chosen:
        client.request(Put(f"{prefix}drain/{node}", b""), timeout)
    end = time.monotonic() + timeout
    while chosen & _nodes(client, prefix).keys():
        if not changed.wait(max(0.0, end - time.monotonic())):
            raise StoreError(
                f"{name} was asked to leave, but is still there after {format_duration(timeout)}"
            )
        changed.clear()
    print(printable(f"{name} has left"))
    return 0


def _nodes(client: StoreClient, prefix: str) -> dict[str, NodeRecord]:
    entries = client.request(Get(prefix + "node/", prefix=True), 10.0).entries
    found = {entry.key.removeprefix(prefix + "node/"): decode_node(entry.value) for entry in entries}
    return {node: record for node, record in found.items() if record is not None}


def make_parser() -> Parser:
    """The options."""
    parser = Parser("drain", "Let a node leave a running job.")
    parser.add_argument(
        "node",
        nargs="?",
        metavar="NODE",
        help="the node's name, as the job's messages call it; without an endpoint, a node of this machine, "
        "or a run, which this machine's node then leaves",
    )
    parser.add_flag("--self", "the nodes of this machine")
    parser.add_run_options("rdzv_endpoint", "rdzv_id", "rdzv_conf", *TRUST)
    add_all_users(parser)
    add_store(parser)
    return parser


def add_store(parser: Parser, timeout: float = 60.0) -> None:
    """The options that say what kind of store a job has, and how long it may take to answer."""
    parser.add_argument(
        "--rdzv-backend",
        "--rdzv_backend",
        choices=BACKENDS,
        default=variables().get("PET_RDZV_BACKEND") or "phalanx",
        help="what kind of store that is [%(default)s]",
    )
    parser.add_value(
        "--timeout", "duration", f"how long it may take [{format_duration(timeout)}]", default=timeout
    )
