"""A node's copies on the next node: its newest saves, and the ballots that make one of them the common one.

Used by one thread, for one round. The newest save of each rank and name is copied as soon as there is time
for it. From the moment at which a save is to become the common one (core/common_saves.py) until that is
settled, that one alone is copied: it is pinned, so that the worker does not replace it meanwhile.
"""

from __future__ import annotations

import json

from phalanx.agent.state import save_record
from phalanx.agent.state.replica_channel import PART, ReplicaChannel
from phalanx.core.common_saves import CONFIRM, Ballot, CommonSaves, Moment, RankSaves, known_common
from phalanx.worker.state.memory_file import MemoryFile, Pins, SlotHeader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Kinds of frames.
HELLO, HAVE, SAVE, DATA, END, ABANDON, FETCH, DONE, BALLOT, PINS = (
    bytes([letter]) for letter in b"HISDEAFZTP"
)

_REMEMBERED = 4  # saves of a rank and name that the next node has: two in its slots


class CopySender:
    """What one node sends to the next in a round."""

    def __init__(
        self,
        own: dict[int, MemoryFile],
        number: int,
        first: bool,
        take_ballots: Callable[[], list[Ballot]],
    ) -> None:
        """`own`: by rank; `first`: whether this is node 0; `take_ballots`: those that have arrived."""
        self._own = own
        self._common = CommonSaves(first, number)
        self._take_ballots = take_ballots
        self._copied: dict[tuple[int, str], set[tuple[int, int, int]]] = {}

    def connected(self, channel: ReplicaChannel) -> None:
        """The next node answers: it reports what it has, and a ballot may have been lost on the way to it."""
        self._copied = {}
        for rank, name, round_, sequence, step in json.loads(channel.receive()[1]):
            known = self._copied.setdefault((int(rank), str(name)), set())
            known.add((int(round_), int(sequence), int(step)))
        for ballot in self._common.sent.values():
            channel.send(BALLOT, pack_ballot(ballot))

    def send_some(self, channel: ReplicaChannel) -> bool:
        """Pass on ballots, and send one save that the next node does not have; False: there is none."""
        self._pass_ballots(channel)
        for file in self._own.values():
            for name, number in file.names().items():
                header = self._to_send(name, file.slots(number), file.pins(number))
                if header is not None:
                    known = self._copied.setdefault((header.rank, name), set())
                    if send_save(channel, file, name, number, header, self._pass_arrived):
                        known.add(_identity(header))
                        if len(known) > _REMEMBERED:
                            known.remove(min(known))
                    return True
        return False

    def _to_send(self, name: str, slots: list[SlotHeader], pins: Pins) -> SlotHeader | None:
        moments = [header.moment for header in slots]
        known = known_common(pins.common, pins.hold, moments)
        moment = self._common.to_copy(name, moments, known) if slots else None
        for header in slots:
            if header.moment == moment:
                copied = self._copied.get((header.rank, name), ())
                return None if _identity(header) in copied else header
        return None

    # -- ballots -------------------------------------------------------------------------------------

    def _pass_arrived(self, channel: ReplicaChannel) -> None:
        if self._arrived():
            self._pass_ballots(channel)

    def _arrived(self) -> bool:
        ballots = self._take_ballots()
        for ballot in ballots:
            self._common.arrive(ballot)
        return bool(ballots)

    def _pass_ballots(self, channel: ReplicaChannel) -> None:
        """Do what the ballots ask for, and pass on those that may go."""
        self._arrived()
        tables = {rank: file.names() for rank, file in self._own.items()}
        for name in {name for table in tables.values() for name in table}:
            numbers = {rank: table[name] for rank, table in tables.items() if name in table}
            if len(numbers) < len(tables):
                continue  # a rank has not kept it yet
            saves = [self._saves(rank, name, number) for rank, number in numbers.items()]
            turn = self._common.turn(name, saves)
            if turn is None:
                continue
            for (rank, number), saved in zip(numbers.items(), saves, strict=True):
                file = self._own[rank]
                pins = file.pins(number)
                file.pin(number, Pins(*turn.pins(pins.common, pins.hold, saved.moments)))
            # A worker may have been about to replace it: it stays if it is still there after the pin.
            candidate = turn.send.candidate if turn.send is not None and turn.send.phase == CONFIRM else None
            now = [self._saves(rank, name, number).moments for rank, number in numbers.items()]
            if turn.send is not None and candidate is not None and any(candidate not in one for one in now):
                turn = turn.replace(send=turn.send.replace(candidate=None))
            self._common.done(turn, saves)
            if turn.send is not None:
                channel.send(BALLOT, pack_ballot(turn.send))

    def _saves(self, rank: int, name: str, number: int) -> RankSaves:
        file = self._own[rank]
        moments = tuple(header.moment for header in file.slots(number) if header.rank == rank)
        copied = frozenset((step, round_) for round_, _, step in self._copied.get((rank, name), ()))
        pins = file.pins(number)
        return RankSaves(moments, copied, known_common(pins.common, pins.hold, moments))


def send_save(
    channel: ReplicaChannel,
    file: MemoryFile,
    name: str,
    number: int,
    header: SlotHeader,
    between: Callable[[ReplicaChannel], None] = lambda _channel: None,
) -> bool:
    """Send one save; False: it was replaced meanwhile. Between its parts other frames may be sent."""
    channel.send(SAVE, save_record.pack(name, header))
    for part in file.copy(number, header, PART):
        if header not in file.slots(number):
            break  # the worker needs the slot: it has saved again, which is the one to copy
        channel.send(DATA, part)
        between(channel)
    whole = header in file.slots(number)
    channel.send(END if whole else ABANDON)
    return whole


def pack_have(files: list[MemoryFile]) -> bytes:
    """What this node has copies of."""
    return json.dumps(
        [
            [header.rank, name, *_identity(header)]
            for file in files
            for name, number in file.names().items()
            for header in file.slots(number)
        ]
    ).encode()


def pack_ballot(ballot: Ballot) -> bytes:
    moments = ballot.common, ballot.candidate, ballot.earlier
    return json.dumps([ballot.name, ballot.serial, ballot.phase, *moments]).encode()


def unpack_ballot(data: bytes) -> Ballot:
    """A ballot from bytes; ValueError for anything else."""
    try:
        name, serial, phase, common, candidate, earlier = json.loads(data)
        moments = _moment(common), _moment(candidate), _moment(earlier)
        return Ballot(str(name), int(serial), int(phase), *moments)
    except TypeError as error:
        raise ValueError(f"not a ballot: {error}") from None


def pack_pins(name: str, pins: Pins) -> bytes:
    return json.dumps([name, pins.common, pins.hold]).encode()


def unpack_pins(data: bytes) -> tuple[str, Pins]:
    """A name and its pins from bytes; ValueError for anything else."""
    try:
        name, common, hold = json.loads(data)
        return str(name), Pins(_moment(common), _moment(hold))
    except TypeError as error:
        raise ValueError(f"not the pins of a name: {error}") from None


def _moment(value: list[int] | None) -> Moment | None:
    if value is None:
        return None
    step, round_ = value
    return int(step), int(round_)


def _identity(header: SlotHeader) -> tuple[int, int, int]:
    return header.round, header.sequence, header.step
