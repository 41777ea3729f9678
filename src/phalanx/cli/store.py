"""`phalanx store --listen HOST:PORT [--journal FILE]`: the embedded store by itself.

With a journal it may be killed and started again under running jobs: no worker notices. One line says where
it listens, one per incident what went wrong; SIGTERM and SIGINT end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from phalanx.errors import PhalanxError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.store.embedded.tls import Tls
    from phalanx.store.embedded.token import Token


class Parser(argparse.ArgumentParser):
    """argparse with our way of complaining: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str]) -> int:
    """Serve until told to end."""
    options = _parser().parse_args(argv)
    from phalanx.membership.address import listening_address, parse_rendezvous_endpoint
    from phalanx.membership.settings import DEFAULT_PORT
    from phalanx.store.embedded.server import Server

    try:
        host, port = parse_rendezvous_endpoint(options.listen, DEFAULT_PORT)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    # Blocked before any thread exists, so that none of them can be the one that gets the signal.
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    failures: list[str] = []

    def fail(text: str) -> None:
        failures.append(text)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        token, tls = trust(options)
        with Server(
            listening_address(host),
            port,
            token=token,
            journal=options.journal,
            linger=options.linger,
            on_incident=_say,
            on_failure=fail,
            tls=tls,
        ) as server:
            where = f"[{server.address[0]}]" if ":" in server.address[0] else server.address[0]
            kept = f", journal {options.journal}" if options.journal else ", no journal: jobs end with it"
            _say(f"listening on {where}:{server.address[1]}{kept}")
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


def _parser() -> Parser:
    parser = Parser(prog="phalanx store", description="Serve the store that the nodes of jobs meet at.")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:29400",
        help="the address to listen on [%(default)s]",
    )
    parser.add_argument(
        "--journal", metavar="FILE", help="keep everything in this file, to go on after a restart"
    )
    parser.add_argument(
        "--linger",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="how long a node whose connection ended may take to come back [%(default)s]",
    )
    add_trust(parser)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The options by which both sides know each other."""
    for flag, about in (
        ("--token-file", "the secret that all nodes share"),
        ("--tls-cert", "TLS: certificate of this side"),
        ("--tls-key", "TLS: its key"),
        ("--tls-ca", "TLS: who signs the others"),
    ):
        variable = f"PHALANX_{flag[2:].replace('-', '_').upper()}"
        parser.add_argument(flag, metavar="FILE", default=os.environ.get(variable, ""), help=about)


def trust(options: argparse.Namespace) -> tuple[Token, Tls | None]:
    """The token, and the files for TLS where it is asked for."""
    from phalanx.store.embedded.token import FILE_VARIABLE, find_token

    token = find_token({FILE_VARIABLE: options.token_file} if options.token_file else None)
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    if not any(files):
        return token, None
    from phalanx.store.embedded.tls import Tls

    return token, Tls(*files)


def _say(line: str) -> None:
    try:
        sys.stderr.write(f"phalanx store: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody listens, and the store goes on
