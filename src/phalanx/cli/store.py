"""`phalanx store --listen [HOST:]PORT [--journal FILE] [--health-listen PORT]`: the embedded store by itself.

With a journal it may be killed and restarted under running jobs, without effect on their workers. It prints
the address it listens on, and one line per incident; SIGTERM and SIGINT end it.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phalanx.cli.parser import TRUST, Parser
from phalanx.errors import PhalanxError, UsageError
from phalanx.job.environment import STORE_PORT, TOKEN_FILE
from phalanx.job.time_budgets import LINGER
from phalanx.log import write_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.store.embedded.server import Server
    from phalanx.store.net.tls import Tls
    from phalanx.store.net.token import Token


LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    options = make_parser().parse_args(argv)
    from phalanx.job.address import listening_address
    from phalanx.store.embedded.server import Server

    host, port = options.listen
    if options.metrics and options.health_listen is None:
        raise UsageError("--metrics is served at --health-listen; add --health-listen [HOST:]PORT")
    # Blocked before any thread exists, so that none of them can be the one that gets the signal.
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    failures: list[str] = []

    def fail(text: str) -> None:
        failures.append(text)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        token, tls = trust(options)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # every node needs a descriptor here
        with Server(
            listening_address(host or LOOPBACK),
            port,
            token=token,
            journal=options.journal,
            linger=_linger(options),
            on_incident=_say,
            on_failure=fail,
            tls=tls,
        ) as server:
            where = f"[{server.address[0]}]" if ":" in server.address[0] else server.address[0]
            kept = f", journal {options.journal}" if options.journal else ", no journal: jobs end with it"
            with _endpoints(server, options.health_listen, options.metrics) as served:
                _say(f"listening on {where}:{server.address[1]}{kept}{served}")
                signal.sigwait(ends)
            if failures:
                _say(failures[0])
                return 1
    except PhalanxError as error:
        if isinstance(error, ValueError):
            raise
        _say(str(error))
        return 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


@contextmanager
def _endpoints(server: Server, address: tuple[str, int] | None, metrics: bool) -> Iterator[str]:
    """Serve /healthz, /readyz and /metrics; words for the line about the store."""
    if address is None:
        yield ""
        return
    from phalanx.web.store_metrics import store_endpoints

    endpoints = store_endpoints(server, *address, metrics=metrics)
    endpoints.start()
    try:
        host = f"[{endpoints.host}]" if ":" in endpoints.host else endpoints.host
        yield f", health at {host}:{endpoints.port}"
    finally:
        endpoints.stop()


def _linger(options: argparse.Namespace) -> float:
    """Nodes cannot tell the death of a store from a cut: one that may come back shortens no lease."""
    if options.linger is not None:
        return float(options.linger)
    return float("inf") if options.journal else LINGER


def make_parser() -> Parser:
    """The options."""
    parser = Parser("store", "Serve the store that the nodes of jobs meet at.")
    parser.add_value(
        "--listen",
        "address",
        f"the address to listen on [{LOOPBACK}:{STORE_PORT}]",
        default=(LOOPBACK, STORE_PORT),
    )
    parser.add_argument("--journal", metavar="FILE", help="keep all data in this file, to survive a restart")
    parser.add_value(
        "--linger",
        "duration",
        "how long a node may take to reconnect, and its workers run on while this store is away "
        "[1s; with a journal: as long as the node's lease]",
    )
    parser.add_value("--health-listen", "address", "serve /healthz and /readyz at this address")
    parser.add_flag("--metrics", "serve /metrics for Prometheus there, too")
    parser.add_run_options(*TRUST)
    return parser


def trust(options: argparse.Namespace) -> tuple[Token, Tls | None]:
    """The token, and the files for TLS where it is asked for."""
    from phalanx.store.net.token import find_token

    token = find_token({TOKEN_FILE: options.token_file} if options.token_file else None)
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    if not any(files):
        return token, None
    from phalanx.store.net.tls import Tls

    return token, Tls(*files)


def _say(line: str) -> None:
    write_stderr(f"phalanx store: {line}\n")
