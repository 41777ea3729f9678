"""The secret that agents of one job share, and where it comes from.

Order: the variable PHALANX_TOKEN, the file named by PHALANX_TOKEN_FILE, the private file
`~/.phalanx/token`, which is made on first use, so that a shared home needs no set-up. The secret
itself is never shown: messages name the file or variable it came from.

A file that another user could have written is refused: whoever writes the token can join the job. What the
two sides prove to each other is a key made from the token. For a token that a person may have chosen, making
it takes a slow function, so that an impostor who has received a proof cannot try many words against it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from phalanx.errors import StoreAuthError
from phalanx.job.environment import TOKEN, TOKEN_FILE, variables
from phalanx.trusted_files import check_directory, make_directory, open_trusted

_LONGEST = 4096
_RANDOM = 32  # bytes; a token of this length was generated, or is a long passphrase
_SALT = b"phalanx store token"  # fixed: both sides make the key before they have exchanged anything


class Token(NamedTuple):
    """The secret, and where to look when it is the wrong one."""

    secret: bytes
    source: str

    @property
    def key(self) -> bytes:
        """What proofs and tags are made with; computed once in a process."""
        return _key(self.secret)

    def __repr__(self) -> str:
        return f"Token(<hidden>, {self.source!r})"


@cache
def _key(secret: bytes) -> bytes:
    import hashlib

    if len(secret) >= _RANDOM:
        return hashlib.sha256(_SALT + secret).digest()
    # About 0.1 s and 32 MiB for each guess.
    return hashlib.scrypt(secret, salt=_SALT, n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32)


def key_of(token: Token | None) -> bytes:
    """The key of a token; without a token a constant, which proves and protects nothing."""
    return token.key if token is not None else b""


def given_token(environ: Mapping[str, str]) -> Token | None:
    """The token that the user has given explicitly, if any."""
    if text := environ.get(TOKEN, "").strip():
        return Token(text.encode(), f"the variable {TOKEN}")
    if path := environ.get(TOKEN_FILE, ""):
        return _read(path, f"the file {path} (named by {TOKEN_FILE})", private=False)
    return None


def find_token(environ: Mapping[str, str] | None = None, *, make: bool = True) -> Token:
    """The token of this user; `make`: create the private file when there is no token yet."""
    env = variables() if environ is None else environ
    if (given := given_token(env)) is not None:
        return given
    home = env.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):  # a user that the system does not know, as in a container: `~` stays as it is
        raise StoreAuthError(
            f"no token: this user has no home directory for one; set {TOKEN}, or {TOKEN_FILE} to a file that "
            "all nodes can read"
        )
    path = os.path.join(home, ".phalanx", "token")
    if make and not os.path.lexists(path):
        _make(path)
    return _read(path, f"the file {path}", private=True)


def _read(path: str, source: str, *, private: bool) -> Token:
    try:
        # A given file may be a link: that is how Kubernetes mounts a secret.
        with open(open_trusted(path, follow=not private), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            secret = file.read(_LONGEST + 1).strip()
    except PermissionError as error:
        raise StoreAuthError(
            f"{source} is not used: {error.filename} {error.strerror}; it and its directories must belong to "
            "this user or root, and others must not be able to write to them"
        ) from error
    except OSError as error:
        raise StoreAuthError(
            f"no token: {source}: {error.strerror}; set {TOKEN} or make that file"
        ) from error
    if private and mode & 0o077:
        raise StoreAuthError(f"{source} can be read by others (mode {mode:o}): chmod 600 {path}")
    if not secret or len(secret) > _LONGEST:
        raise StoreAuthError(f"{source} holds {len(secret)} bytes: a token has 1 to {_LONGEST}")
    return Token(secret, source)


def _make(path: str) -> None:
    """Write a fresh token so that of several first users exactly one wins and all read the same."""
    import secrets

    directory = os.path.dirname(path)
    draft = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        make_directory(directory)
        check_directory(directory)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, secrets.token_hex(32).encode() + b"\n")
        finally:
            os.close(fd)
        try:
            os.link(draft, path)  # fails if the file exists by now; a rename would replace it
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    except OSError as error:
        raise StoreAuthError(
            f"cannot make the token file {path}: {error.strerror}; set {TOKEN} instead"
        ) from error
