"""The secret that agents of one job share, and where it comes from.

Order: the variable PHALANX_TOKEN, the file named by PHALANX_TOKEN_FILE, the private file
`~/.phalanx/token`, which is made on first use, so that a shared home needs no set-up. The secret
itself is never shown: messages name the file or variable it came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.environment import TOKEN, TOKEN_FILE, variables
from phalanx.errors import StoreAuthError

_LONGEST = 4096


class Token(NamedTuple):
    """The secret, and where to look when it is the wrong one."""

    secret: bytes
    source: str

    def __repr__(self) -> str:
        return f"Token(<hidden>, {self.source!r})"


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
    path = os.path.join(home, ".phalanx", "token")
    if make and not os.path.lexists(path):
        _make(path)
    return _read(path, f"the file {path}", private=True)


def _read(path: str, source: str, *, private: bool) -> Token:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            secret = file.read(_LONGEST + 1).strip()
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
        os.makedirs(directory, mode=0o700, exist_ok=True)
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
