"""One syntax for each kind of value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job.options import OPTIONS
from phalanx.job.units import READERS, address, duration, format_duration, ranks, signal_number, size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30), ("30s", 30), ("10m", 600), ("1h30m", 5400), ("1d", 86400), ("1.5h", 5400), ("2h5s", 7205),
        (" 90S ", 90), ("0", 0), ("0.25", 0.25), (".5", 0.5), ("1e3", 1000), ("-1", -1), ("1d1h1m1s", 90061),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "nan", "inf", "m", "10x", "1m1m", "5s1m", "1h 5", "1h5", "--5m", "1h-5m", "1e3m", "5ms"],
)
def test_what_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration; write 30, 30s, 10m, 1h30m or 1d"):
        duration(text)


@given(st.integers(0, 10**9))
def test_a_duration_is_read_back(seconds: int) -> None:
    assert duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (0.1, "0.1s"), (90, "1m30s"), (3600, "1h"), (7 * 86400, "7d"), (5.5, "5.5s")],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("512M", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5mb", 3 << 19),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "M", "10X", "1e3", "infM", "1 GB of", "-M", "2iGB"])
def test_what_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size; write 4096, 512M or 2GiB"):
        size(text)


@pytest.mark.parametrize(
    ("text", "found"), [("", None), ("0", {0}), ("0,3-5", {0, 3, 4, 5}), (" 7 , 9 ", {7, 9}), ("2-2", {2})]
)
def test_ranks(text: str, found: set[int] | None) -> None:
    assert ranks(text) == found


@pytest.mark.parametrize("text", ["x", "3-", "5-3", "1,,2", "-1", "0-99999999999", "٣"])
def test_what_are_no_ranks(text: str) -> None:
    with pytest.raises(ValueError, match="write 0,3-7"):
        ranks(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8080", ("", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert address(text) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not an address; write PORT or HOST:PORT"),
        ("host", "not an address"),
        ("host:", "not an address"),
        ("1.2.3.4:-1", "not an address"),
        (":80", "not an address"),
        ("[]:80", "not an address"),
        ("host:65536", "between 0 and 65535"),
        ("fe80::1:80", r"put an IPv6 address in brackets: \[fe80::1\]:80"),
    ],
)
def test_what_are_no_addresses(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        address(text)


def test_signals() -> None:
    assert signal_number("SIGUSR1") == signal_number("USR1") == 10
    assert signal_number("SIG_DFL") is signal_number("NOPE") is None


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: str(option.name))
def test_each_option_is_of_a_known_kind_and_its_default_is_within_its_bounds(option: Any) -> None:
    assert option.kind == "flag" or option.kind in READERS
    if option.default not in (None, "", ()):
        option.check(
            READERS[option.kind](option.default) if isinstance(option.default, str) else option.default
        )
