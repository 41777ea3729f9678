"""Checks of this machine's place in the network: its name, its ports, and the way to the store of a job.

Names are looked up forwards only, in a thread that is abandoned when it takes too long: slow DNS is a
finding, and what follows is still checked. Nothing is changed: a check makes no token and serves no store.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from phalanx.core.diagnosis.fitness import FIT, UNFIT, WARN, CheckFinding
from phalanx.errors import PhalanxError, StoreAuthError
from phalanx.job.environment import ETCD_PORT, STATIC_PORT, STORE_PORT, TOKEN_FILE

if TYPE_CHECKING:
    from phalanx.cluster.settings import Settings
    from phalanx.store.client import StoreClient
    from phalanx.store.net.token import Token

NAME_LIMIT, STORE_LIMIT = 10.0, 60.0
_NAME_TIME = 5.0
_REACH_TIME = 3.0
_STORE_GRACE, _STORE_TIME = 4.0, 10.0
_MOST_ADDRESSES = 4


def own_name(local_addr: str, settings: Settings | None) -> Iterator[CheckFinding]:
    """Whether the name that other nodes get resolves to this node."""
    name = local_addr or socket.gethostname()
    addresses, why = resolve(name)
    shown = f"{name}: {', '.join(addresses) or why}"
    advice = "set the address of this node: --local-addr ADDRESS"
    bad = UNFIT if local_addr else WARN  # a job on one node does not need the name
    if not addresses:
        yield CheckFinding("own name", shown, bad, advice)
    elif not any(map(is_here, addresses)):
        yield CheckFinding("own name", shown, bad, f"not an address of this node; {advice}")
    elif settings is not None and all(one.startswith("127.") or one == "::1" for one in addresses):
        yield CheckFinding("own name", shown, WARN, f"only this machine can use that; {advice}")
    else:
        yield CheckFinding("own name", shown)


def ports(settings: Settings | None) -> Iterator[CheckFinding]:
    """Whether the ports that a job uses by default are free; that of a store which is asked is not needed."""
    for port, what in ((STORE_PORT, "the store"), (STATIC_PORT, "--rdzv-backend static")):
        if settings is not None and settings.port == port:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            yield CheckFinding(f"port {port}", "free")
        except OSError as error:
            advice = f"in use (by another job?); for {what} choose another port, or 0"
            yield CheckFinding(f"port {port}", error.strerror or str(error), WARN, advice)


def way_to_the_store(settings: Settings, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """From the name to the first answer of the store."""
    from phalanx.job.address import parse_rendezvous_endpoint

    etcd, there = settings.store == "etcd", False
    for part in settings.endpoint.split(",") if etcd else [settings.endpoint]:
        default = ETCD_PORT if etcd else STORE_PORT
        host, port = parse_rendezvous_endpoint(part.rpartition("://")[2].rstrip("/"), default)
        addresses, why = resolve(host)
        if addresses:
            yield CheckFinding(f"name {host}", ", ".join(addresses))
        else:
            advice = "correct the name, add it to DNS or /etc/hosts, or write the address itself"
            yield CheckFinding(f"name {host}", why, UNFIT, advice)
        for address in addresses[:_MOST_ADDRESSES]:
            problem = reach(address, port)
            there = there or not problem
            yield _reached(f"reach {address} port {port}", problem, is_here(address) and not etcd)
    if there:
        yield from _at_the_store(settings, environ)


def _reached(check: str, problem: str, would_serve: bool) -> CheckFinding:
    if not problem:
        return CheckFinding(check, "answers")
    if problem == "Connection refused":
        if would_serve:
            return CheckFinding(check, "no listener yet", FIT, "this node would serve the store: fine")
        advice = "nothing runs there: start the node that owns this address, or phalanx store, or etcd"
        return CheckFinding(check, problem, UNFIT, advice)
    advice = "a firewall, or the wrong network? allow TCP to this port; several networks: --local-addr"
    return CheckFinding(check, problem, UNFIT, advice)


def _at_the_store(settings: Settings, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Token, TLS and the first request."""
    try:
        token = None if settings.store == "etcd" else _token(settings, environ)
        with closing(_client(settings, token, environ)) as client:  # as its own context it waits for less
            began = time.monotonic()
            client.connect(_STORE_TIME)
            client.get("check/")
            took = time.monotonic() - began
    except PhalanxError as error:
        check = "token" if isinstance(error, StoreAuthError) else "store"
        yield CheckFinding(check, "no conversation", UNFIT, str(error))
        return
    if token is not None:
        yield CheckFinding("token", f"accepted, from {token.source}")
    yield CheckFinding("store", f"answers, {took * 1000:.0f} ms")


def _token(settings: Settings, environ: Mapping[str, str]) -> Token:
    from phalanx.store.net.token import find_token

    # A check makes no file: the token of a running store is another one.
    return find_token({TOKEN_FILE: settings.token_file} if settings.token_file else environ, make=False)


def _client(settings: Settings, token: Token | None, environ: Mapping[str, str]) -> StoreClient:
    if settings.store == "etcd":
        from phalanx.store.etcd.client import etcd_client_from

        config = settings.params.config
        return etcd_client_from(settings.endpoint, config, environ=environ, grace=_STORE_GRACE)
    from phalanx.store.embedded.client import Client

    return Client(settings.host, settings.port, token=token, tls=settings.tls, grace=_STORE_GRACE)


def resolve(host: str, limit: float = _NAME_TIME) -> tuple[list[str], str]:
    """The addresses of a name, or why there are none."""
    answers: list[list[str] | str] = []

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answers.append(list(dict.fromkeys(str(where[4][0]) for where in found)))
        except (OSError, UnicodeError) as error:
            answers.append(getattr(error, "strerror", None) or str(error))

    thread = threading.Thread(target=look_up, name="phalanx-check-name", daemon=True)
    thread.start()
    thread.join(limit)
    answer = answers[0] if answers else f"no answer within {limit:g} s"
    return (answer, "") if isinstance(answer, list) else ([], answer)


def is_here(address: str) -> bool:
    """Whether an address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False


def reach(address: str, port: int, limit: float = _REACH_TIME) -> str:
    """ "" when a connection can be made, else why not."""
    try:
        socket.create_connection((address, port), timeout=limit).close()
        return ""
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return error.strerror or str(error)
