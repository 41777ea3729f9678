"""One syntax for each kind of value, in options, commands, variables and files alike.

    duration   30, 30s, 10m, 1.5h, 1h30m, 7d    seconds
    size       4096, 512M, 2GiB                 bytes, in units of 1024
    ranks      0,3-7
    address    [HOST:]PORT, an IPv6 address in brackets
    signal     SIGUSR1 or USR1

A parser returns the value, or raises `ValueError` with what to write instead.
"""

from __future__ import annotations

TYPE_CHECKING = False  # on the way to the first worker: importing `typing` would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
_SECONDS: Mapping[str, float] = {"d": DAY, "h": HOUR, "m": MINUTE, "s": 1.0}
_BYTES: Mapping[str, int] = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST_RANKS = 1 << 17
_NOT_A_DURATION = "not a duration; write 30, 30s, 10m, 1h30m or 1d"


def duration(text: str) -> float:
    """Seconds."""
    rest, total = text.strip().lower(), 0.0
    if not rest or rest[0] not in "0123456789.-":  # no nan, no infinity
        raise ValueError(_NOT_A_DURATION)
    try:
        if rest[-1] not in _SECONDS:
            return float(rest)
        for unit, factor in _SECONDS.items():  # from days down, each at most once
            number, found, after = rest.partition(unit)
            if found:
                total += _decimal(number) * factor
                rest = after
    except ValueError:
        raise ValueError(_NOT_A_DURATION) from None
    if rest:
        raise ValueError(_NOT_A_DURATION)
    return total


def _decimal(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal():
        raise ValueError(text)
    return float(text)


def format_duration(seconds: float) -> str:
    """The shortest text that `duration` reads back: 90 s as 1m30s."""
    rest, words = seconds, ""
    for unit, factor in _SECONDS.items():
        whole = rest // factor
        if whole and unit != "s":
            words += f"{whole:g}{unit}"
            rest -= whole * factor
    return words + (f"{rest:g}s" if rest else "") or "0"


def size(text: str) -> int:
    """Bytes."""
    word = text.strip().lower()
    number = word.rstrip("kmgtib")
    unit = word[len(number) :].removesuffix("b").removesuffix("i")
    try:
        return int(_decimal(number) * _BYTES[unit])
    except (ValueError, KeyError):
        raise ValueError("not a size; write 4096, 512M or 2GiB") from None


def ranks(text: str) -> frozenset[int] | None:
    """The ranks; None, for all of them, where the text is empty."""
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (part.isascii() and first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError("not a list of ranks; write 0,3-7")
        begin, end = int(first), int(last) if dash else int(first)
        if not begin <= end < begin + _MOST_RANKS:
            raise ValueError(f"{part.strip()} is not a range; write 0,3-7")
        found.update(range(begin, end + 1))
    return frozenset(found)


def address(text: str) -> tuple[str, int]:
    """The host, empty where none is named, and the port."""
    host, colon, port = text.strip().rpartition(":")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not (port.isascii() and port.isdigit() and int(port) <= 65535) or (colon and not bare):
        raise ValueError("not an address; write PORT or HOST:PORT, with a port between 0 and 65535")
    if ":" in bare and bare == host:
        raise ValueError(f"put an IPv6 address in brackets: [{host}]:{port}")
    return bare, int(port)


def signal_number(name: str) -> int | None:
    """The number of a signal with this name, with or without SIG; None: there is none."""
    import signal

    found = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
    return int(found) if isinstance(found, signal.Signals) else None


def words(text: str) -> tuple[str, ...]:
    """Words between single commas; a doubled comma stands for one inside a word."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def truth(text: str) -> bool | None:
    """The meaning of a flag's variable; None where it has none."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    return bool(int(word)) if word.removeprefix("-").isdigit() else None


def whole(text: str) -> int:
    """An integer."""
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError("not a whole number") from None


# --- values made of others ------------------------------------------------------------------------------


def _streams(text: str) -> str:
    """`3`, or `0:3,1:1`: by local rank, 1 for stdout, 2 for stderr, 3 for both."""
    for pair in [] if text in ("0", "1", "2", "3") else text.split(","):
        rank, colon, stream = pair.partition(":")
        if not (colon and rank.isdigit() and rank.isascii() and stream in ("0", "1", "2", "3")):
            raise ValueError("use 0, 1, 2 or 3, or RANK:N,RANK:N with those numbers")
    return text


def _backoff(text: str) -> tuple[float, float]:
    """FIRST[:LONGEST]; the first delay and the longest."""
    first, colon, longest = text.partition(":")
    try:
        least, most = duration(first), duration(longest) if colon else LONGEST_BACKOFF
    except ValueError:
        raise ValueError("write a duration, or FIRST:LONGEST, as in 0.5s:30s") from None
    if not 0 <= least <= DAY or not 0 <= most <= DAY:
        raise ValueError("must be between 0 and 1d")
    if colon and most < least:
        raise ValueError("the first delay is larger than the longest")
    return least, max(least, most)


def _failures(text: str) -> frozenset[int | str]:
    """Exit codes as a shell shows them (128+n: signal n), and exceptions by name."""
    found: set[int | str] = set()
    parts = [part.strip() for part in text.split(",")]
    for part in [] if parts == ["none"] else filter(None, parts):
        name = part.rpartition(".")[2]
        if name.isidentifier() and (name[0].isupper() or "." in part) and not part.startswith("SIG"):
            found.add(name)
            continue
        signal = signal_number(part) if part.startswith("SIG") else None
        if signal is None and part.removeprefix("-").isdigit():
            signal = -int(part) if part.startswith("-") else 0
            if not signal and 1 <= int(part) <= 255:
                found.add(int(part))
                continue
        if not signal or signal > 64:
            raise ValueError(f"{part!r} is neither an exit code (1 to 255), a signal nor an exception")
        found.add(128 + signal)
    return frozenset(found)


def _rotation(text: str) -> tuple[int, int | None] | None:
    """SIZE[:PARTS]: the size of a part, and how many parts are kept; None for off."""
    if text.strip() in ("", "off"):
        return None
    bytes_, colon, keep = text.partition(":")
    try:
        part, kept = size(bytes_), int(keep) if colon else None
    except ValueError:
        raise ValueError("write SIZE or SIZE:PARTS, as in 100M or 1G:5") from None
    if not 4096 <= part <= 1 << 50:
        raise ValueError("a part has at least 4K")
    if kept is not None and kept < 1:
        raise ValueError("keep at least one part, or leave out the number to keep all")
    return part, kept


def _quarantine(text: str) -> str:
    """K:WINDOW:COOLDOWN, with the durations in seconds."""
    from phalanx.core.rounds.quarantine import parse_policy

    count, *spans = text.split(":")
    try:
        plain = ":".join([count, *(f"{duration(span):g}" for span in spans)])
        parse_policy(plain)
    except ValueError:
        raise ValueError("write K:WINDOW:COOLDOWN, as in 3:1h:1h, with K from 1 to 32; or off") from None
    return plain


def _preemption(text: str) -> int:
    number = signal_number(text)
    if number is None or text.removeprefix("SIG") in ("KILL", "STOP", "CHLD", "SEGV", "CONT"):
        raise ValueError("name a signal that can be handled, as in SIGUSR1")
    return number


def _listen(text: str) -> str:
    if text:
        address(text)
    return text


def _page(text: str) -> tuple[str, int] | None:
    """An address; on: any port of loopback; off: None."""
    asked = truth(text)
    if asked is False:
        return None
    if asked and not (text.strip().isdecimal() and text.strip() != "1"):
        return "127.0.0.1", 0
    host, port = address(text)
    return host or "127.0.0.1", port


def _text(text: str) -> str:
    return text


LONGEST_BACKOFF = 30.0
READERS: Mapping[str, Callable[[str], Any]] = {
    "address": address, "backoff": _backoff, "choice": _text, "duration": duration, "failures": _failures,
    "directory": _text, "file": _text, "int": whole, "list": lambda text: tuple(filter(None, words(text))),
    "listen": _listen, "page": _page, "port": whole, "quarantine": _quarantine, "ranks": ranks,
    "rotation": _rotation, "signal": _preemption, "std": _streams, "text": _text, "workers": _text,
}  # fmt: skip
"""The parser of each kind of value in the table of options."""
