"""Finds calls of NCCL that would hang on GPUs, in the recordings of all ranks.

The recordings are replayed as on GPUs: streams run concurrently, a call waits for equal calls of its peers
and for earlier calls of its communicator, an event wait blocks its stream, a synchronization blocks the host. What is
left at the end would hang.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

Lane = tuple[str, str]
"""A communicator or, for a collective on hosts, their group. For messages, also the sender and the receiver."""
_ON_STREAM = ("call", "record", "wait")
NO_STREAM = "of "
"""Begins the name of a queue of calls for which nothing waits."""
_CREATES, SPLITS = "creates it", "splits it"
"""What a host does with a communicator. Each has a lane of its own, instead of a sender and a receiver."""


class NcclCall(NamedTuple):
    """A call that waits for other ranks."""

    lane: Lane
    rank: str
    """Who calls: "rank 3"."""
    verb: str
    """For messages "sends" or "receives"."""
    position: int
    """Its number in the lane, from 1."""
    what: str
    line: str
    """The line of Python; before it, after " < ", the lines that led to it."""
    order: int
    """Its place among the calls of its rank."""

    @property
    def side(self) -> str:
        """Who calls: "rank 3" or, for messages, "rank 3 sends" and "rank 3 receives"."""
        return f"{self.rank} {self.verb}".strip()

    def __str__(self) -> str:
        return f"{self.what} at {self.line.partition(' < ')[0]}" if self.line else self.what


class _Instruction(NamedTuple):
    kind: str
    subject: str
    """The stream or, for "event", the event."""
    number: int
    """How often the event was recorded before, or the number of the launch in its communicator."""
    event: str = ""
    calls: tuple[NcclCall, ...] = ()


class Other(NamedTuple):
    """A rank that does not meet a call."""

    rank: str
    """Empty for a rank that does not create the communicator."""
    side: str
    call: NcclCall | None
    """Its call at the same position, if it has one."""


class Waiting(NamedTuple):
    """A call that never completes."""

    call: NcclCall
    others: list[Other]


class Recording:
    """What a rank has recorded."""

    def __init__(self, path: Path) -> None:
        """Read a file; a last line that is not complete is left out."""
        self.name = f"rank {path.name.removeprefix('rank')}"
        self.places: dict[str, tuple[int, int]] = {}
        """The rank's number in each communicator, and the communicator's size."""
        self.descriptions: dict[str, str] = {}
        self.calls: defaultdict[tuple[Lane, str], list[NcclCall]] = defaultdict(list)
        """The calls of each lane and verb."""
        self.threads: defaultdict[str, list[_Instruction]] = defaultdict(list)
        """The instructions of the host, and of further threads that wait for other ranks."""
        self.lines = set[str]()
        commands, description = self.threads[""], ""
        recorded, launches, launch = Counter[str](), dict[tuple[str, str], int](), ("", "")
        for line in path.read_text(errors="replace").split("\n")[:-1]:
            match line.split("\t"):
                case "describe", description:
                    pass
                case "place", group, number, size, text:
                    self.places[group], self.descriptions[group] = (int(number), int(size)), text
                case "host", group, number, size, what, at, thread, *message:
                    self.places.setdefault(group, (int(number), int(size)))
                    between, verb = message or ("", "")
                    if what == _CREATES:
                        self.descriptions[group], description = description, ""
                    between = what if what in (_CREATES, SPLITS) else between
                    call = self._call((group, between), verb, what, at)
                    self.threads[thread].append(_Instruction("host", "", 0, calls=(call,)))
                case "call", group, between, verb, what, at, stream, number:
                    call = self._call((group, between), verb, what, at)
                    if launch == (launch := (group, number)):  # both are between ncclGroupStart and ncclGroupEnd
                        before = commands[launches[launch]]
                        commands[launches[launch]] = before._replace(calls=(*before.calls, call))
                    else:
                        launches[launch] = len(commands)
                        order = stream if stream.startswith(NO_STREAM) else group
                        commands.append(_Instruction("call", stream, recorded[order], order, (call,)))
                        recorded[order] += 1
                case "await", group, number:
                    commands.append(commands[launches[group, number]]._replace(kind="await"))
                case kind, subject, event:
                    recorded[event] += kind == "record"
                    commands.append(_Instruction(kind, subject, recorded[subject if kind == "event" else event], event))

    def _call(self, lane: Lane, verb: str, what: str, line: str) -> NcclCall:
        calls = self.calls[lane, verb]
        order = sum(map(len, self.threads.values()))
        calls.append(NcclCall(lane, self.name, verb, len(calls) + 1, what, line, order))
        self.lines.update(line.split(" < "))
        return calls[-1]


_Heads = defaultdict[tuple[Lane, int], dict[str, str]]
"""By lane and position: what each side calls there."""


class _Machine:
    """The hosts and streams of all ranks, each with a queue of instructions."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._ranks = replay, replay.recordings
        self._queues = {
            (name, thread): deque(commands)
            for name, recording in self._ranks.items()
            for thread, commands in recording.threads.items()
        }
        self._hosts = {*self._queues}
        self._done = Counter[tuple[str, str]]()
        """By rank and event: how often it was recorded, and calls completed."""
        self._issued: _Heads = defaultdict(dict)
        """Calls that hosts have issued."""
        self._reached: _Heads = defaultdict(dict)
        """Calls that have come to the head of their queue."""

    def run(self) -> None:
        """Run all hosts and streams until nothing can move."""
        moves = True
        while moves:
            moves = False
            for (rank, stream), queue in [*self._queues.items()]:
                while queue and ((not stream and queue[0].kind in _ON_STREAM) or not self._waits(rank, queue[0])):
                    moves = True
                    self._execute(rank, stream, queue.popleft())

    def stuck(self) -> list[tuple[NcclCall, list[str]]]:
        """Return the first call of each rank that still waits, with the sides that do not meet it."""
        first: dict[str, tuple[NcclCall, list[str]]] = {}
        for command in (queue[0] for queue in self._queues.values() if queue):
            for call in command.calls:
                sides = self._missing(call, command)
                if sides and (call.rank not in first or call.order < first[call.rank][0].order):
                    first[call.rank] = call, sides
        return [first[name] for name in self._ranks if name in first]

    def _execute(self, rank: str, stream: str, command: _Instruction) -> None:
        if not stream and command.kind in _ON_STREAM:  # a host issues it
            self._queues.setdefault((rank, command.subject), deque()).append(command)
            for call in command.calls:
                self._issued[call.lane, call.position][call.side] = call.what
        elif command.kind in ("call", "record"):
            number = command.number + (command.kind == "call")
            self._done[rank, command.event] = max(self._done[rank, command.event], number)

    def _waits(self, rank: str, command: _Instruction) -> bool:
        """Return True if the instruction at the head of a queue cannot be executed yet."""
        for call in command.calls:
            self._reached[call.lane, call.position][call.side] = call.what
        met = not any(self._missing(call, command) for call in command.calls)
        match command.kind:
            case "call" | "wait":
                return not met or self._done[rank, command.event] < command.number
            case "event":
                return self._done[rank, command.subject] < command.number
            case "stream":
                return bool(self._queues.get((rank, command.subject)))
            case "device":
                streams = (key for key in self._queues if key[0] == rank and key not in self._hosts)
                return any(self._queues[key] for key in streams if not key[1].startswith(NO_STREAM))
        return not met

    def _missing(self, call: NcclCall, command: _Instruction) -> list[str]:
        """Return the sides that do not meet a call; "" for ranks without a recording."""
        heads = self._issued if command.kind == "await" else self._reached
        there, sides = heads[call.lane, call.position], self._replay.lanes[call.lane]
        found = [
            side
            for side, (rank, calls) in sides.items()
            if there.get(side) != call.what and not (self._may_call(rank) and len(calls) < call.position)
        ]
        size = self._ranks[call.rank].places[call.lane[0]][1]
        if ">" not in call.lane[1] and len(sides) < size:
            late = [rank for rank in self._replay.running if rank not in sides and self._may_call(rank)]
            found += [""] * (len(sides) + len(late) < size)
        return found

    def _may_call(self, rank: str) -> bool:
        """Return True if the rank may make further calls."""
        return rank in self._replay.running and not self._queues.get((rank, ""))


class Replay:
    """What a replay of the recordings in a folder has found."""

    def __init__(self, folder: Path | str, *, running: Collection[str] = ()) -> None:
        """The ranks `running` may make further calls."""
        found = map(Recording, Path(folder).glob("rank*"))
        self.recordings = {each.name: each for each in sorted(found, key=lambda each: (len(each.name), each.name))}
        self.running = running
        self.lanes: dict[Lane, dict[str, tuple[str, list[NcclCall]]]] = {}
        """For each lane its sides, with their rank and their calls. A side without calls is a side, too."""
        for lane in {lane: None for rank in self.recordings.values() for lane, _ in rank.calls}:
            self.lanes[lane] = {side: (rank, self.recordings[rank].calls[lane, verb])
                                 for rank, verb, side in self._sides(lane)}  # fmt: skip
        lanes = [sides for (_, between), sides in self.lanes.items() if between not in (_CREATES, SPLITS)]
        self.calls = sum(max(len(calls) for _, calls in sides.values()) for sides in lanes)
        """Calls compared; a call that several ranks make together counts once."""
        machine = _Machine(self)
        machine.run()
        self.waiting = [Waiting(call, [self._other(call, side) for side in sides]) for call, sides in machine.stuck()]

    def members(self, group: str) -> list[str]:
        """Return the ranks of a communicator."""
        return [name for name, each in self.recordings.items() if group in each.places]

    @property
    def kinds(self) -> int:
        """How many different sequences of calls the ranks have made, in communicators with the same descriptions."""
        found = set[tuple[object, ...]]()
        for each in self.recordings.values():
            calls = sorted((call for calls in each.calls.values() for call in calls), key=lambda call: call.order)
            found.add(tuple((self.description(call.lane[0]), call.verb, call.what, call.line) for call in calls))
        return len(found)

    def description(self, group: str) -> str:
        """Return torch's description of a communicator."""
        return next((text for each in self.recordings.values() if (text := each.descriptions.get(group))), "")

    def _sides(self, lane: Lane) -> list[tuple[str, str, str]]:
        group, between = lane
        if ">" not in between:
            return [(name, "", name) for name in self.members(group)]
        places = {str(self.recordings[name].places[group][0]): name for name in self.members(group)}
        ends = zip(between.split(">"), ("sends", "receives"), strict=True)
        return [(places[place], verb, f"{places[place]} {verb}") for place, verb in ends if place in places]

    def _other(self, like: NcclCall, side: str) -> Other:
        rank, calls = self.lanes[like.lane][side] if side else ("", [])
        return Other(rank, side, calls[like.position - 1] if len(calls) >= like.position else None)

    def pairs(self, call: NcclCall, rank: str) -> Iterator[tuple[NcclCall, NcclCall | None]]:
        """Yield this and earlier calls at which another rank is at another line, each pair of lines once."""
        mine = self.recordings[call.rank].calls[call.lane, call.verb][: call.position]
        others = (calls for name, calls in self.lanes[call.lane].values() if name == rank)
        pairs = zip_longest(mine, next(others, [])[: call.position])
        different: dict[tuple[str, str | None], tuple[NcclCall, NcclCall | None]] = {}
        for one, other in pairs:
            different.setdefault((one.line, other and other.line), (one, other))
        yield from (pair for lines, pair in different.items() if lines[0] != lines[1])
