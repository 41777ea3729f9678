"""What every request must bring, and what every answer carries. Nothing behind it is reached without.

- **Host**: an address in digits, `localhost`, this machine's name or the given one. A page of another site
  that had its name resolved to this address (DNS rebinding) sends its own name.
- **Origin**: where it is sent, that of the page itself; requests that change something must send it.
- **Token**: in the link, once; then in a cookie that scripts cannot read and other sites cannot send. Both
  are compared in constant time. It is asked for on every route and method, before the route is looked up.

The answer to the link sets the cookie and moves on to the address without the token. That is a step of its
own and not a redirect: after a click in a mail or a chat, browsers would not send a strict cookie with one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from typing import Any
from urllib.parse import parse_qs

COOKIE = "phalanx_page_"
"""The beginning of its name; the rest is the page's own, as browsers send cookies to all ports of a host."""
LET_IN = "phalanx.let_in"
"""In the scope of a request that was let in."""
METHODS = ("GET", "HEAD", "POST")
_LONGEST_TOKEN = 256
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/]+))(?::[0-9]{1,5})?", re.ASCII)
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_WELCOME = (
    b'<!doctype html><html lang="en"><meta charset="utf-8">'
    b'<meta name="viewport" content="width=device-width">'
    b'<meta http-equiv="refresh" content="0;url=/"><title>Phalanx</title><a href="/">Open the page</a></html>'
)


class PageGuard:
    """The application behind its checks (ASGI)."""

    def __init__(self, app: Any, token: str, host: str) -> None:
        self._app = app
        self._token = token.encode()
        # Not the token itself: who reads the cookie of one browser cannot make a link of it.
        secret = hashlib.sha256(b"cookie:" + self._token).hexdigest()
        name = hashlib.sha256(b"name:" + self._token).hexdigest()
        self._cookie = f"{COOKIE}{name[:12]}={secret[:40]}".encode()  # short: a browser may hold many
        own = os.uname().nodename.lower()
        self._names = {"localhost", host.lower(), own, own.partition(".")[0]}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = _headers(scope)
        if headers is None or not self._is_own_host(headers.get(b"host", b"")):
            await _answer(send, 421, b"this address is not served here\n")
            return
        by_link = scope["path"] == "/" and self._has_link(scope)
        if not by_link and not self._has_cookie(headers.get(b"cookie", b"")):
            await _answer(send, 401, b"open the link that phalanx printed, or run: phalanx status --link\n")
            return
        if not _is_own_origin(headers, scope["method"]):
            await _answer(send, 403, b"requests of other sites are refused\n")
            return
        if scope["method"] not in METHODS:
            await _answer(send, 405, b"use GET, HEAD or POST\n", (b"allow", b"GET, HEAD, POST"))
            return
        scope[LET_IN] = True
        if by_link:
            cookie = self._cookie + b"; HttpOnly; SameSite=Strict; Path=/"
            page = b"" if scope["method"] == "HEAD" else _WELCOME
            await _answer(send, 200, page, (b"set-cookie", cookie), kind=b"text/html; charset=utf-8")
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [one for one in message.get("headers", []) if one[0].lower() not in own]
                message = {**message, "headers": [*kept, *HEADERS]}
            await send(message)

        await self._app(scope, receive, guarded)

    def _is_own_host(self, value: bytes) -> bool:
        found = _HOST.fullmatch(value.decode("latin-1").lower())
        host = "" if found is None else found[1] or found[2]
        if host in self._names:
            return True
        try:
            ipaddress.ip_address(host)  # no name: nothing that could have been resolved to this machine
        except ValueError:
            return False
        return True

    def _has_link(self, scope: dict[str, Any]) -> bool:
        query = scope.get("query_string", b"")
        if b"token=" not in query or len(query) > 4 * _LONGEST_TOKEN:
            return False
        given = parse_qs(query.decode("latin-1")).get("token", [""])[-1].encode()
        return len(given) <= _LONGEST_TOKEN and hmac.compare_digest(given, self._token)

    def _has_cookie(self, value: bytes) -> bool:
        parts = [part.strip() for part in value.split(b";")]
        return any(hmac.compare_digest(part, self._cookie) for part in parts)


def _headers(scope: dict[str, Any]) -> dict[bytes, bytes] | None:
    """By name; None where one that is checked comes twice."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (b"host", b"origin", b"content-length"):
            return None
        found[name] = value if name not in found else found[name] + b"; " + value
    return found


def _is_own_origin(headers: dict[bytes, bytes], method: str) -> bool:
    origin = headers.get(b"origin")
    if origin is not None:
        return origin.lower() == b"http://" + headers[b"host"].lower()
    return method in ("GET", "HEAD")


async def _answer(
    send: Any, code: int, body: bytes, *more: tuple[bytes, bytes], kind: bytes = b"text/plain; charset=utf-8"
) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more, *HEADERS]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
