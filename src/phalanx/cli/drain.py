"""`phalanx drain RUN [--node N]`: let a node leave a running job; the others re-form without it.

Of a job on this machine through its agent; of any other with --rdzv-endpoint, and then it returns when the
node has left, or reports why it cannot know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from phalanx.cli.parser import TRUST, Parser
from phalanx.cli.runs import add_run
from phalanx.cli.store import trust
from phalanx.core.rounds.records import NodeRecord, decode_node
from phalanx.core.rounds.store_commands import Get, Notice, Put
from phalanx.errors import StoreError, UsageError
from phalanx.job.environment import STORE_PORT, variables
from phalanx.job.units import format_duration
from phalanx.log import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from phalanx.store.client import StoreClient

BACKENDS = ("phalanx", "c10d", "etcd")


def main(argv: Sequence[str]) -> int:
    """Ask; with a store, wait until the node has left."""
    options = make_parser().parse_args(argv)
    if not options.rdzv_endpoint:
        from phalanx.cli.control import leave

        return leave(options)
    conf = settings_of(options)
    name = str(options.node or conf.get("name") or os.uname().nodename)
    with store_client(options, conf) as client:
        return drain(client, options.run, name, options.timeout)


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

    grace = min(10.0, options.timeout)
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
    parser = Parser(
        "drain", "Let a node leave a running job. With --rdzv-endpoint, RUN is the job's --rdzv-id."
    )
    add_run(parser, required=True)
    about = "the node's name, as the job's messages call it [that of this machine]"
    parser.add_argument("--node", metavar="NODE", default="", help=about)
    parser.add_run_options("rdzv_endpoint", "rdzv_conf", *TRUST)
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
