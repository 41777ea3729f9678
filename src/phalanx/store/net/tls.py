"""TLS around a connection to the store: the files, what is checked, and the errors.

The token proves membership in the job; TLS keeps others from reading and from writing
into the stream. The two are tied together: both sides put the fingerprint of the server's
certificate into the proof of the token, so a certificate of a man in the middle makes the
proof fail. That is why a certificate need not name the host (nodes are reached by whatever address
the scheduler made up today) and why a self-signed one will do.

With a CA each side must also show a certificate that this CA signed: mutual, and before the first
byte of the store's protocol is read. etcd is checked the usual way instead, host name and all.

Imported only when TLS is asked for: `ssl` costs more to load than the rest of the store.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.errors import StoreAuthError, UsageError
from phalanx.store.net.wire import WireError

PROTOCOL_ALERT = bytes.fromhex("15 0301 0002 02 46")  # fatal: protocol version


class Tls(NamedTuple):
    """The files: this side's certificate and key (one file may hold both), and the CA of the others."""

    cert: str = ""
    key: str = ""
    ca: str = ""


class TlsError(WireError):
    """TLS failed; the connection is unusable."""


class TlsChannel(ssl.SSLSocket):
    """A socket whose `send` and `recv` behave like a plain one's where it would have to wait."""

    waits_to_read = False  # the last `send` needs bytes from the other side first (a handshake)

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        """As a plain socket's; a record that is not complete yet is BlockingIOError."""
        return self._plainly(lambda: super(TlsChannel, self).recv(size, flags))  # type: ignore[no-any-return]

    def send(self, data: Any, flags: int = 0) -> int:
        """As a plain socket's; it also drives a handshake that is not over."""
        self.waits_to_read = False
        return self._plainly(lambda: super(TlsChannel, self).send(data, flags))  # type: ignore[no-any-return]

    def do_handshake(self, block: bool = False) -> None:
        """Come to terms with the other side."""
        self._plainly(lambda: super(TlsChannel, self).do_handshake(block))

    def _plainly(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except ssl.SSLWantReadError as error:
            self.waits_to_read = True
            raise BlockingIOError(str(error)) from None
        except ssl.SSLWantWriteError as error:
            raise BlockingIOError(str(error)) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise BrokenPipeError(f"the other side hung up: {error}") from None
        except ssl.SSLError as error:
            if self.server_side:
                self._turn_away()
            raise TlsError(_words(error)) from None

    def _turn_away(self) -> None:
        """Make sure that the reason arrives: closing over unread bytes would reset the connection."""
        try:
            while socket.socket.recv(self, 65536, socket.MSG_DONTWAIT):
                pass
        except OSError:
            pass
        try:
            # OpenSSL is silent towards what is not TLS at all; an alert after its own one is ignored.
            socket.socket.send(self, PROTOCOL_ALERT, socket.MSG_DONTWAIT)
        except OSError:
            pass


def server_context(tls: Tls) -> ssl.SSLContext:
    """For a store that listens; UsageError when the files will not do."""
    if not tls.cert:
        raise UsageError("TLS: a store that listens needs a certificate of its own; add --tls-cert FILE")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections live as long as the job: nothing to resume
    _load_own(context, tls)
    if tls.ca:
        _load_ca(context, tls.ca, "--tls-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsChannel
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """For a connection to a store; without a CA the token alone vouches for the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # see the top of this module
    if tls.ca:
        _load_ca(context, tls.ca, "--tls-ca")
    else:
        context.verify_mode = ssl.CERT_NONE
    if tls.cert:
        _load_own(context, tls)
    elif tls.key:
        raise UsageError(f"--tls-key {tls.key}: a key without its certificate; add --tls-cert FILE")
    context.sslsocket_class = TlsChannel
    return context


def https_context(ca: str, cert: str = "", key: str = "") -> ssl.SSLContext:
    """For ordinary HTTPS: host names checked, the system's CAs unless one is named."""
    context = ssl.create_default_context()
    if ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(context, ca, "cacert")
    if cert:
        _load_own(context, Tls(cert, key, ca))
    elif key:
        raise UsageError(f"key {key}: a key without its certificate; add cert=FILE")
    return context


def own_fingerprint(tls: Tls) -> bytes:
    """Of the certificate that this side shows: the first one in its file."""
    with open(tls.cert, encoding="ascii", errors="replace") as file:
        text = file.read()
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])).digest()


def dial(context: ssl.SSLContext, sock: socket.socket) -> tuple[socket.socket, bytes]:
    """TLS over a connected socket, which it takes over, and the other side's fingerprint."""
    sealed = context.wrap_socket(sock, do_handshake_on_connect=False)
    try:
        sealed.do_handshake()
        shown = sealed.getpeercert(binary_form=True)
        return sealed, hashlib.sha256(shown or b"").digest()
    except BaseException:
        sealed.close()
        raise


def refusal(where: str, tls: Tls, error: TlsError) -> StoreAuthError:
    """What a person should do about a handshake that failed."""
    text = str(error)
    if "wrong version number" in text:
        advice = "it does not speak TLS; start it with --tls-cert and --tls-key, or drop --tls-* here"
    elif "verify failed" in text:
        advice = f"its certificate is not signed by the CA in {tls.ca}"
    elif "alert" in text and tls.cert:
        advice = f"it does not accept our certificate {tls.cert}; both sides need the same CA (--tls-ca)"
    elif "alert" in text:
        advice = "it wants a certificate from us; add --tls-cert and --tls-key"
    else:
        advice = "check --tls-cert, --tls-key and --tls-ca on both sides"
    return StoreAuthError(f"no TLS with the store at {where} ({text}): {advice}")


def _words(error: OSError) -> str:
    reason = (getattr(error, "reason", "") or str(error)).replace("_", " ").lower()
    detail = getattr(error, "verify_message", "")
    return f"TLS: {reason}{': ' * bool(detail)}{detail}"


def _load_own(context: ssl.SSLContext, tls: Tls) -> None:
    _readable(tls.cert, "certificate")
    if tls.key:
        _readable(tls.key, "key")
    try:
        # Without this a key with a passphrase would ask the terminal, of which an agent has none.
        context.load_cert_chain(tls.cert, tls.key or None, password=_no_passphrase)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"the certificate {tls.cert} and the key {tls.key or tls.cert} are of no use "
            f"({_words(error)}); both must be PEM and belong together"
        ) from None


def _no_passphrase() -> str:
    raise UsageError("the TLS key has a passphrase, which an agent cannot type; use a key without one")


def _load_ca(context: ssl.SSLContext, path: str, what: str) -> None:
    _readable(path, "CA")
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"{what} {path}: not a file of PEM certificates ({_words(error)})") from None


def _readable(path: str, what: str) -> None:
    if not os.access(path, os.R_OK):
        state = "cannot be read by this user" if os.path.exists(path) else "no such file"
        raise UsageError(f"TLS {what} {path}: {state}")
