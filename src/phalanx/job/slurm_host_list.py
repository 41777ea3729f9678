"""Slurm's host lists: `rack[1-2]n[01-03,7]-ib,login` → the names, in Slurm's order.

A list is names between commas. A name may have any number of brackets, each with numbers and ranges between
commas; the rightmost bracket counts fastest. A range keeps the zeros of its first number: `[008-010]`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 65536  # hosts in one list, as in Slurm: a list from the environment must not fill the memory


def parse_host_list(text: str) -> list[str]:
    """The hosts of a list; ValueError names what cannot be read."""
    found: list[str] = []
    for word in _split(text.strip(), text):
        for name in _expand(word, text):
            found.append(name)
            if len(found) > MOST:
                raise ValueError(f"host list {text[:80]!r}: more than {MOST} hosts")
    return found


def first_host(text: str) -> str:
    """The first host of a list; empty for an empty list."""
    for word in _split(text.strip(), text):
        return next(_expand(word, text))
    return ""


def format_host_list(hosts: list[str]) -> str:
    """Names between commas, each once: every command of Slurm reads that."""
    return ",".join(dict.fromkeys(hosts))


def parse_counts(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]: a number for each node, as in SLURM_TASKS_PER_NODE."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        number, several, times = part.partition("(x")
        repeat = times.removesuffix(")") if several else "1"
        if not (_is_number(number) and _is_number(repeat)) or int(repeat) > MOST:
            raise ValueError(f"{text!r}: not a list of counts such as 2(x3),1")
        counts += [int(number)] * int(repeat)
    return counts


def _split(text: str, whole: str) -> Iterator[str]:
    """The words between commas outside of brackets."""
    word, inside = "", False
    for char in text:
        if (char == "[" and inside) or (char == "]" and not inside):
            raise ValueError(f"host list {whole[:80]!r}: brackets do not match")
        inside = char == "[" or (inside and char != "]")
        if char == "," and not inside:
            if word.strip():
                yield word.strip()
            word = ""
        else:
            word += char
    if inside:
        raise ValueError(f"host list {whole[:80]!r}: brackets do not match")
    if word.strip():
        yield word.strip()


def _expand(word: str, whole: str) -> Iterator[str]:
    """All names of one word; its length is not known before, so they are made one by one."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    ranges, _, after = rest.partition("]")
    for number in _numbers(ranges, whole):
        for tail in _expand(after, whole) if after else ("",):
            yield before + number + tail


def _numbers(ranges: str, whole: str) -> Iterator[str]:
    for part in ranges.split(","):
        low, dash, high = part.strip().partition("-")
        high = high if dash else low
        if not (_is_number(low) and _is_number(high)) or int(high) < int(low):
            raise ValueError(f"host list {whole[:80]!r}: {part!r} is not a number or a range such as 1-8")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
