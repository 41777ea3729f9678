"""What `phalanx doctor` checks about the network: names, ports, the store, and the other nodes.

Names are looked up forwards only, in a thread that is abandoned when it takes too long: slow DNS is a
finding. With --with N, doctors on several nodes register at the store, connect to each other and compare
clocks (doctor_meeting.py). When there is no store, the node that owns the endpoint's address serves one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from phalanx.cli.doctor import OK, PROBLEM, WARN, Asked, Finding
from phalanx.errors import PhalanxError, StoreAuthError, StoreError
from phalanx.job.environment import ETCD_PORT, STATIC_PORT, STORE_PORT, TOKEN_FILE

if TYPE_CHECKING:
    from phalanx.store.embedded.client import Client
    from phalanx.store.etcd.client import EtcdClient
    from phalanx.store.net.tls import Tls
    from phalanx.store.net.token import Token

NAME_TIME = 5.0
REACH_TIME = 3.0


def resolve(host: str, limit: float = NAME_TIME) -> tuple[list[str], str]:
    """The addresses of a name, or why there are none."""
    answers: list[list[str] | str] = []

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answers.append(list(dict.fromkeys(str(where[4][0]) for where in found)))
        except (OSError, UnicodeError) as error:
            answers.append(getattr(error, "strerror", None) or str(error))

    thread = threading.Thread(target=look_up, name="phalanx-doctor-name", daemon=True)
    thread.start()
    thread.join(limit)
    answer = answers[0] if answers else f"no answer within {limit:g} s"
    return (answer, "") if isinstance(answer, list) else ([], answer)


def own_name(asked: Asked) -> Iterator[Finding]:
    """Whether the name that other nodes get resolves to this node."""
    name = asked.local_addr or socket.gethostname()
    addresses, why = resolve(name)
    shown = f"{name}: {', '.join(addresses) or why}"
    advice = "set the address of this node: --local-addr ADDRESS"
    if not addresses:
        # A job on one node does not need the name.
        yield Finding("own name", shown, PROBLEM if asked.local_addr else WARN, advice)
    elif not any(map(is_here, addresses)):
        yield Finding(
            "own name", shown, PROBLEM if asked.local_addr else WARN, f"not an address of this node; {advice}"
        )
    elif all(address.startswith("127.") or address == "::1" for address in addresses) and asked.endpoint:
        yield Finding("own name", shown, WARN, f"only this machine can use that; {advice}")
    else:
        yield Finding("own name", shown)


def is_here(address: str) -> bool:
    """Whether an address belongs to this machine."""
    try:
        with _socket_for(address) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def ports(asked: Asked) -> Iterator[Finding]:
    """Whether the ports that a job would use are free."""
    for port, what in ((STORE_PORT, "the store"), (STATIC_PORT, "--rdzv-backend static")):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            yield Finding(f"port {port}", "free")
        except OSError as error:
            advice = f"in use (by another job?); for {what} choose another port, or 0"
            yield Finding(f"port {port}", error.strerror or str(error), WARN, advice)


def reach(address: str, port: int, limit: float = REACH_TIME) -> str:
    """ "" when a connection can be made, else why not."""
    try:
        socket.create_connection((address, port), timeout=limit).close()
        return ""
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return error.strerror or str(error)


def way_to_the_store(asked: Asked, environ: Mapping[str, str]) -> Iterator[Finding]:
    """From the name to the first answer of the store, and to the other doctors."""
    from phalanx.job.address import parse_rendezvous_endpoint

    parts = asked.endpoint.split(",") if asked.backend == "etcd" else [asked.endpoint]
    hosting, there = False, False
    for part in parts:
        default = ETCD_PORT if asked.backend == "etcd" else STORE_PORT
        host, port = parse_rendezvous_endpoint(part.rpartition("://")[2].rstrip("/"), default)
        addresses, why = resolve(host)
        advice = "correct the name, add it to DNS or /etc/hosts, or write the address itself"
        yield Finding(
            f"name {host}",
            ", ".join(addresses) or why,
            OK if addresses else PROBLEM,
            "" if addresses else advice,
        )
        for address in addresses[:4]:
            problem = reach(address, port)
            hosting = hosting or (problem == "Connection refused" and is_here(address))
            there = there or not problem
            yield _reached(asked, address, port, problem)
    waiting = asked.together > 1 and asked.backend != "etcd"
    if there or waiting:
        yield from _at_the_store(asked, environ, hosting and not there)


def _reached(asked: Asked, address: str, port: int, problem: str) -> Finding:
    check = f"reach {address} port {port}"
    if not problem:
        return Finding(check, "answers")
    if problem == "Connection refused":
        if is_here(address) and asked.backend != "etcd":
            return Finding(check, "no listener yet", OK, "this node would serve the store: fine")
        advice = "nothing runs there: start the node that owns this address, or phalanx store, or etcd"
        return Finding(check, problem, WARN if asked.together > 1 else PROBLEM, advice)
    advice = "a firewall, or the wrong network? allow TCP to this port; several networks: --local-addr"
    return Finding(check, problem, PROBLEM, advice)


def _at_the_store(asked: Asked, environ: Mapping[str, str], hosting: bool) -> Iterator[Finding]:
    """Token, TLS, the first request, and the meeting."""
    try:
        token = None if asked.backend == "etcd" else _token(asked, environ)
    except StoreAuthError as error:
        yield Finding("token", "none", PROBLEM, str(error))
        return
    with ExitStack() as stack:
        try:
            if hosting:
                hosting = _serve(asked, token, stack)
            client = _client(asked, token, environ)
            stack.callback(client.close)
            began = time.monotonic()
            client.connect(asked.wait if asked.together > 1 else 10.0)
            client.get("doctor/")
            took = time.monotonic() - began
        except PhalanxError as error:
            verdict = Finding("store", "no conversation", PROBLEM, str(error))
            yield verdict._replace(check="token") if isinstance(error, StoreAuthError) else verdict
            return
        if token is not None:
            yield Finding("token", f"accepted, from {token.source}")
        yield Finding("store", f"answers, {took * 1000:.0f} ms{', served from here' * hosting}")
        if asked.together > 1:
            from phalanx.cli.doctor_meeting import meet

            yield from meet(client, asked)
        else:
            yield Finding(
                "clocks", "not compared", OK, "run doctor on the nodes at the same time, with --with N"
            )


def _token(asked: Asked, environ: Mapping[str, str]) -> Token:
    from phalanx.store.net.token import Token, find_token

    if not asked.token_file:
        # A check makes no file: the token of a running store is another one.
        return find_token(dict(environ), make=asked.together > 1)
    found = find_token({TOKEN_FILE: asked.token_file})
    return Token(found.secret, f"the file {asked.token_file}")


def _tls(asked: Asked) -> Tls | None:
    if not any(asked.tls):
        return None
    from phalanx.store.net.tls import Tls

    return Tls(*asked.tls)


def _serve(asked: Asked, token: Token | None, stack: ExitStack) -> bool:
    """Serve a store, unless another doctor on this machine already does."""
    from phalanx.job.address import listening_address, parse_rendezvous_endpoint
    from phalanx.store.embedded.server import Server

    host, port = parse_rendezvous_endpoint(asked.endpoint, STORE_PORT)
    try:
        stack.enter_context(Server(listening_address(host), port, token=token, tls=_tls(asked)))
    except StoreError as error:
        if "in use" not in str(error):
            raise
        return False
    return True


def _client(asked: Asked, token: Token | None, environ: Mapping[str, str]) -> Client | EtcdClient:
    patience = asked.wait if asked.together > 1 else 4.0
    if asked.backend == "etcd":
        from phalanx.store.etcd.client import etcd_client_from

        files = dict(zip(("tls_cert", "tls_key", "tls_ca"), asked.tls, strict=True))
        return etcd_client_from(asked.endpoint, {**files, **asked.conf}, environ=environ, grace=patience)
    from phalanx.job.address import parse_rendezvous_endpoint
    from phalanx.store.embedded.client import Client

    where = parse_rendezvous_endpoint(asked.endpoint, STORE_PORT)
    return Client(*where, token=token, tls=_tls(asked), grace=patience)
