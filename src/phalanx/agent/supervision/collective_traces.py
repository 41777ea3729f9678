"""The recorded collectives of workers: read, understood, condensed for the other nodes, and saved.

torch's flight recorder answers with JSON. It comes from a program that this user runs, and through the store
from other nodes, so nothing is taken for granted: what is not as expected is left out, entry by entry, and
sizes are bounded everywhere. A rank of which nothing is left has no trace, which the verdict respects.

The dumps are saved in the form that torch's own tools read: one pickle of plain values per rank, in a
directory of their own (`torchfrtrace DIRECTORY`). Nothing here ever reads a pickle.

Every backend has a recorder, which is asked for by the backend's name: the worker writes the names down with
its groups. Older versions of torch have two recorders and ignore the name, so an operation may arrive several
times.

Ages instead of times: the nodes' clocks differ, but all read at nearly the same moment.
"""

from __future__ import annotations

import _thread
import os
import time
from urllib.parse import quote

from phalanx.agent.supervision.silent_workers import SilentWorkers
from phalanx.agent.supervision.trace_reader import ask
from phalanx.core.diagnosis.collectives import GroupTrace, Operation, RankTrace
from phalanx.core.diagnosis.patience import RANK_BUSY
from phalanx.worker.torch_collectives import GROUPS_SUFFIX, runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

# gloo's recorder, and the one of the older NCCL backend.
_RECORDERS = ("/handler/fr_trace_json", "/handler/dump_nccl_trace_json")
_RECORDER = "/handler/fr_trace_json?backend="
_HEALTH = "/handler/c10d_health_check"
_SELF_RECORDING = frozenset({"gloo", "nccl", "xccl"})
"""Backends that retire an operation when it completes. torch retires an operation of any other backend when
it is issued, unless that backend reports what completes."""
_MAX_BACKENDS = 8
_MAX_ENTRIES = 20_000
_MAX_GROUPS = 1000
_MAX_MEMBERS = 1 << 20
_MAX_GROUPS_FILE = 16 << 20  # bytes
_MAX_TEXT = 100
_MAX_TENSORS = 8  # of one operation
_MAX_NUMBER = 1 << 62
_KEPT = 32  # complete operations of each group that are looked at
_LATEST = 10  # operations of each group that other nodes get
_LATEST_GROUPS = 24  # of each rank, the most recently used first
MALFORMED = (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError)
DEFAULT_GROUP = "default_pg"


class TraceCollection:
    """Asks ranks for their collectives in a thread: their sockets and processes, by global rank."""

    def __init__(self, paths: Mapping[int, str], pids: Mapping[int, int], directory: str) -> None:
        self.traces: dict[int, RankTrace] = {}
        self.parsed = self.saved = False
        self.asked = sorted(paths)
        self._paths, self._directory = dict(paths), directory
        self._silent = SilentWorkers(dict(pids), time.monotonic())
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        dumps: dict[int, dict[str, Any]] = {}
        try:
            dumps = read_dumps(self._paths, RANK_BUSY, self._is_awaited, health=True)
            self.traces = parse_all(dumps)
        finally:
            self.parsed = True
            save(self._directory, dumps)
            self.saved = True

    def _is_awaited(self, silent: set[int], begun: set[int]) -> bool:
        return bool(self._silent.awaited(silent, begun, time.monotonic()))


def read_dumps(
    paths: Mapping[int, str],
    timeout: float,
    awaited: Callable[[set[int], set[int]], bool] | None = None,
    *,
    health: bool = False,
) -> dict[int, dict[str, Any]]:
    """The dumps of all ranks that answer in time, with the members of their groups; waits.

    `health`: also which backends have failed, by torch's health check, which never recovers.
    """
    groups = {rank: _read_groups(path + GROUPS_SUFFIX) for rank, path in paths.items()}
    named = {rank: _backends(found) for rank, found in groups.items()}
    targets = {
        rank: (
            *_RECORDERS,
            *(_RECORDER + quote(name, "", errors="replace") for name in names if name != "gloo"),
        )
        for rank, names in named.items()
    }
    asked = {(rank, target): path for rank, path in paths.items() for target in targets[rank]}
    if health:
        asked |= {(rank, _HEALTH): path for rank, path in paths.items()}
    answers = ask(asked, timeout, awaited)
    dumps = {}
    for rank in paths:
        found = [decode(answers[rank, target]) for target in targets[rank] if (rank, target) in answers]
        dump = join([dump for dump in found if dump is not None])
        if dump is not None:
            _add_groups(dump, groups[rank])
            seen = {_library(entry) for entry in dump.get("entries") or ()}
            dump["unrecorded"] = [name for name in named[rank] if name != "gloo" and name not in seen]
            dump["unhealthy"] = _unhealthy(answers.get((rank, _HEALTH), b""))
            dumps[rank] = dump
    return dumps


def _unhealthy(answer: bytes) -> list[str]:
    found = _json(answer)
    names = found.get("unhealthy_backends") if isinstance(found, dict) and not found.get("healthy") else None
    return [_text(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []


def join(dumps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One dump of a rank that uses several backends; None of none."""
    used: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    seen: set[str] = set()
    for dump in dumps:
        recorded = dump.get("entries")
        if not isinstance(recorded, list):
            continue
        names = {_identity(entry): entry for entry in recorded if isinstance(entry, dict)}
        new = [entry for name, entry in names.items() if name not in seen]
        seen.update(names)
        if new:
            _mark_uncompleted(dump, new)
            groups = dump.get("pg_config")
            config |= groups if isinstance(groups, dict) else {}
            entries += new
            used.append(dump)
    if not used:
        return dumps[0] if dumps else None
    if len(used) == 1:
        return {**used[0], "entries": entries}
    entries.sort(key=_created)
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    # Without the status of the groups: each recorder has numbers of its own for them.
    return {**used[0], "entries": entries, "pg_config": config, "pg_status": {}}


def _identity(entry: Mapping[str, Any]) -> str:
    parts = ("profiling_name", "process_group", "record_id", "time_created_ns", "thread_id")
    return repr([entry.get(part) for part in parts])


def _mark_uncompleted(dump: Mapping[str, Any], entries: list[dict[str, Any]]) -> None:
    """Mark the entries of a recorder that does not notice what completes: there, `retired` is not done."""
    status = dump.get("pg_status")
    for one in status.values() if isinstance(status, dict) else ():
        if isinstance(one, dict) and str(one.get("last_completed_collective", "-1")) != "-1":
            return
    if any(_library(one) in _SELF_RECORDING or one.get("state") == "completed" for one in entries):
        return
    if any(one.get("retired") for one in entries):
        for one in entries:
            one["retired"], one["completes"] = bool(one.get("is_p2p")), False


def _library(entry: object) -> str:
    """The backend in an entry's `nccl2:all_reduce`."""
    name = entry.get("profiling_name") if isinstance(entry, dict) else None
    return name.rpartition(":")[0] if isinstance(name, str) else ""


def parse_all(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, RankTrace]:
    """The dumps as records, with ages as of now."""
    now = time.time_ns()
    return {rank: parse(rank, dump, now) for rank, dump in dumps.items()}


def read_traces(paths: Mapping[int, str], timeout: float) -> dict[int, RankTrace]:
    """The collectives of all ranks that answer in time; waits."""
    return parse_all(read_dumps(paths, timeout))


# ---- torch's JSON ------------------------------------------------------------------------------------


def decode(answer: bytes) -> dict[str, Any] | None:
    """A dump as torch's server sends it; None if it is not one."""
    dump = _json(answer)
    return dump if isinstance(dump, dict) else None


def _json(data: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _read_groups(path: str) -> list[dict[str, Any]]:
    """The groups that a worker has written down."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            lines = file.read(_MAX_GROUPS_FILE).splitlines()
    except OSError:
        return []
    groups = [_json(line) for line in lines[-_MAX_GROUPS:]]
    return [group for group in groups if isinstance(group, dict)]


def _backends(groups: list[dict[str, Any]]) -> list[str]:
    """The names of their backends: those of third parties have any characters."""
    found: set[str] = set()
    for group in groups:
        names = group.get("backends")
        found.update(name for name in names if isinstance(name, str)) if isinstance(names, list) else None
    return [name for name in sorted(found) if len(name) <= _MAX_TEXT][:_MAX_BACKENDS]


def _add_groups(dump: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Complete the groups of a dump by those that the worker has written: gloo does not record them."""
    found = dump.get("pg_config")
    config = {name: one for name, one in found.items() if name} if isinstance(found, dict) else {}
    for group in groups:
        try:
            name, ranks = _text(group["name"]), spread(group["ranks"])
            config[name] = {"name": name, "desc": _text(group["desc"]), "ranks": str(list(ranks))}
        except MALFORMED:
            continue
    dump["pg_config"] = config


def parse(rank: int, dump: Mapping[str, Any], now: int) -> RankTrace:
    """What a dump says, as far as it can be understood; `now` in nanoseconds of the clock of its times."""
    members: dict[str, tuple[int, ...]] = {}
    labels: dict[str, str] = {}
    config = dump.get("pg_config")
    for one in list(config.values() if isinstance(config, dict) else ())[:_MAX_GROUPS]:
        try:
            name = _text(one["name"])
            if name:
                members[name] = _listed(one["ranks"])
                labels[name] = _text(one["desc"])
        except MALFORMED:
            continue
    operations: dict[str, list[Operation]] = {}
    ids: dict[str, str] = {}  # of the groups in the status
    uncompleted: dict[str, set[str]] = {}  # libraries by group
    entries = dump.get("entries")
    for entry in (entries if isinstance(entries, list) else [])[: -_MAX_ENTRIES - 1 : -1]:
        try:
            name, label = entry["process_group"]
            known = operations.get(name, ())
            if len(known) >= _KEPT and (_is_done(entry) or entry.get("completes") is False):
                continue  # most of the thousands
            name, label = _text(name), _text(label)
            found = _operation(entry, members.get(name, ()), now)
            operations.setdefault(name, []).append(found)
            labels.setdefault(name, label)
            ids[str(entry["pg_id"])] = name
            if entry.get("completes") is False:
                uncompleted.setdefault(name, set()).add(found.library)
        except MALFORMED:
            continue
    status = dump.get("pg_status")
    entered: dict[str, int] = {}
    for key, one in list(status.items() if isinstance(status, dict) else ())[:_MAX_GROUPS]:
        try:
            if key in ids:
                entered[ids[key]] = _number(one["last_enqueued_collective"])
        except MALFORMED:
            continue
    return RankTrace(
        rank,
        tuple(
            _group(
                name, labels[name], members.get(name, ()), operations.get(name, []), entered.get(name, 0)
            ).replace(uncompleted=tuple(sorted(uncompleted.get(name, ()))))
            for name in labels
        )[:_MAX_GROUPS],
        _names(dump.get("unrecorded")),
        _names(dump.get("unhealthy")),
    )


def _names(value: object) -> tuple[str, ...]:
    names = value[:_MAX_BACKENDS] if isinstance(value, list) else ()
    return tuple(_text(name) for name in names if isinstance(name, str))


def _group(
    name: str, desc: str, members: tuple[int, ...], latest_first: list[Operation], entered: int
) -> GroupTrace:
    label = "" if desc == DEFAULT_GROUP else name if desc in ("", "undefined") else desc
    found = tuple(reversed(latest_first))
    highest = max((one.number for one in found if one.peer is None), default=0)
    return GroupTrace(name, label, members, found, max(entered, highest))


def _operation(entry: Mapping[str, Any], members: tuple[int, ...], now: int) -> Operation:
    library, _, name = _text(entry["profiling_name"]).rpartition(":")
    pair = bool(entry["is_p2p"])
    created = entry.get("time_created_ns")
    return Operation(
        number=_number(entry["p2p_seq_id" if pair else "collective_seq_id"]),
        name=name.lstrip("_").partition(" ")[0],
        done=_is_done(entry),
        inputs=tuple(tuple(map(_number, shape)) for shape in entry.get("input_sizes", ())[:_MAX_TENSORS]),
        types=tuple(_text(word) for word in entry.get("input_dtypes", ())[:_MAX_TENSORS]),
        age=max(0.0, (now - created) / 1e9) if isinstance(created, int) and created > 0 else None,
        library=library,
        peer=_peer(name, members) if pair else None,
    )


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _peer(name: str, members: tuple[int, ...]) -> int:
    """The other rank of `send 0->1` or `recv 1<-0`, which count within the group; -1: not told."""
    for arrow in ("->", "<-"):
        _, found, other = name.rpartition(arrow)
        if found and other.strip().isdecimal():
            index = int(other)
            return members[index] if index < len(members) else -1
    return -1


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return "".join(c if c.isprintable() else "?" for c in value[:_MAX_TEXT])


def _number(value: object) -> int:
    number = int(value)  # type: ignore[call-overload]  # torch writes some as text; anything else raises
    if not -_MAX_NUMBER < number < _MAX_NUMBER:
        raise ValueError
    return int(number)


def _listed(value: object) -> tuple[int, ...]:
    """`[0, 1, 2]`, as torch writes the members of a group."""
    if not isinstance(value, str):
        raise TypeError
    return tuple(
        sorted({_number(word) for word in value.strip("[] ").split(",")[:_MAX_MEMBERS] if word.strip()})
    )


def spread(text: object) -> tuple[int, ...]:
    """`0-63,70` as ranks; ValueError if it is too long."""
    if not isinstance(text, str):
        raise TypeError
    found: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        low, high = _number(first), _number(last or first)
        if low < 0 or high - low >= _MAX_MEMBERS - len(found):
            raise ValueError
        found += range(low, high + 1)
    return tuple(sorted(set(found)))


# ---- for the other nodes -----------------------------------------------------------------------------


def condense(traces: Mapping[int, RankTrace]) -> dict[str, Any]:
    """The latest operations, for a report to another node: a few hundred bytes per group and rank."""
    groups: list[list[str]] = []  # each once, for all ranks
    indices: dict[tuple[str, str, tuple[int, ...]], int] = {}
    ranks = []
    for rank, trace in sorted(traces.items()):
        latest = sorted(
            trace.groups, key=lambda group: min((one.age or 0.0 for one in group.operations), default=1e9)
        )
        kept = []
        for group in latest[:_LATEST_GROUPS]:
            key = (group.name, group.label, group.members)
            if key not in indices:
                indices[key] = len(groups)
                groups.append([group.name, group.label, runs(group.members)])
            # Those that it waits in, however many others came later.
            waits = [one for one in group.operations if not one.done][:_LATEST]
            others = [one for one in group.operations[-_LATEST:] if one not in waits]
            chosen = sorted((*waits, *others), key=lambda one: one.number)
            kept.append([indices[key], group.entered, group.uncompleted, [_pack(one) for one in chosen]])
        ranks.append([rank, kept, trace.unrecorded, trace.unhealthy])
    return {"groups": groups, "ranks": ranks}


def restore(data: Mapping[str, Any]) -> dict[int, RankTrace]:
    """What `condense` made, as far as it can be understood."""
    found: dict[int, RankTrace] = {}
    try:
        groups = [
            (_text(name), _text(label), spread(members))
            for name, label, members in data["groups"][:_MAX_GROUPS]
        ]
        listed = list(data["ranks"])[:_MAX_MEMBERS]
    except MALFORMED:
        return found
    for item in listed:
        try:
            rank, kept, unrecorded, unhealthy = item
            traces = []
            for index, entered, uncompleted, operations in kept[:_LATEST_GROUPS]:
                name, label, members = groups[index]
                unpacked = tuple(_unpack(one) for one in operations[: 2 * _LATEST])
                traces.append(
                    GroupTrace(name, label, members, unpacked, _number(entered), _names(uncompleted))
                )
            found[_number(rank)] = RankTrace(
                _number(rank), tuple(traces), _names(unrecorded), _names(unhealthy)
            )
        except MALFORMED:
            continue
    return found


def _pack(one: Operation) -> list[Any]:
    age = None if one.age is None else round(one.age, 4)
    return [one.number, one.name, one.done, one.inputs, one.types, age, one.library, one.peer]


def _unpack(value: Any) -> Operation:
    number, name, done, inputs, types, age, library, peer = value
    return Operation(
        _number(number),
        _text(name),
        bool(done),
        tuple(tuple(map(_number, shape)) for shape in inputs[:_MAX_TENSORS]),
        tuple(_text(word) for word in types[:_MAX_TENSORS]),
        None if age is None else float(age),
        _text(library),
        None if peer is None else _number(peer),
    )


# ---- for torch's tools -------------------------------------------------------------------------------


def save(directory: str, dumps: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the dumps of ranks as torch's tools read them; a full disk is not worth a word."""
    if not directory or not dumps:
        return
    import pickle

    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        for rank, dump in dumps.items():
            with open(os.path.join(directory, f"rank_{rank}"), "wb") as file:
                pickle.dump(_complete(dump), file, protocol=2)
    except (OSError, *MALFORMED):
        pass


def save_condensed(directory: str, traces: Iterable[RankTrace]) -> None:
    """The same for what other nodes have sent, in a thread: there may be thousands of ranks."""
    import threading

    found = list(traces)
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(
        target=lambda: save(directory, {trace.rank: dump_of(trace) for trace in found}),
        name="phalanx-traces",
    ).start()


def dump_of(trace: RankTrace) -> dict[str, Any]:
    """A dump as torch would have made it, from what another node has sent."""
    now = time.time_ns()
    entries = [
        _entry(index, group, one, now) for index, group in enumerate(trace.groups) for one in group.operations
    ]
    entries.sort(key=_created)
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    config = {
        group.name: {
            "name": group.name,
            "desc": group.label or DEFAULT_GROUP,
            "ranks": str(list(group.members)),
        }
        for group in trace.groups
    }
    return {"version": "2.10", "entries": entries, "pg_config": config}


def _entry(index: int, group: GroupTrace, one: Operation, now: int) -> dict[str, Any]:
    sizes, types = [list(shape) for shape in one.inputs], list(one.types)
    pair = one.peer is not None
    return {
        "process_group": [group.name, group.label or DEFAULT_GROUP],
        "pg_id": index,
        "is_p2p": pair,
        "p2p_seq_id": one.number if pair else 0,
        "collective_seq_id": 0 if pair else one.number,
        "op_id": one.number,
        "profiling_name": f"{one.library}:{one.name}",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": types,
        "output_dtypes": types,
        "time_created_ns": now - int((one.age or 0.0) * 1e9),
        "state": "completed" if one.done else "scheduled",
        "retired": one.done,
    }


def _created(entry: Mapping[str, Any]) -> int:
    created = entry.get("time_created_ns")
    return created if isinstance(created, int) else 0


def _complete(dump: Mapping[str, Any]) -> dict[str, Any]:
    """With what torch's tools expect, and gloo does not record."""
    entries = [
        {**entry, "state": "completed"} if entry.get("retired") else entry for entry in dump["entries"]
    ]
    return {"version": "2.10", "pg_config": {}, **dump, "entries": entries}
