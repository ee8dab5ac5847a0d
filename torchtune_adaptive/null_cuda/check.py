"""Finds calls of NCCL that would hang on GPUs: python -m torchtune_adaptive.null_cuda.check FOLDER, with recordings.

The calls of all ranks are compared in each communicator, and replayed as on GPUs: streams run concurrently, a call
waits for its peers and for earlier calls of its communicator, an event wait blocks its stream, a synchronization blocks
the host. What is left at the end would hang.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

Lane = tuple[str, str]
"""A communicator or, for a collective on hosts, their group. For messages, also the sender and the receiver."""
_ON_STREAM = ("call", "record", "wait")
_CREATION = "creation"
"""Instead of a sender and a receiver: the lane in which ranks create the communicator."""


class NcclCall(NamedTuple):
    """A call that waits for other ranks."""

    lane: Lane
    side: str
    """Who calls: "rank 3" or, for messages, "rank 3 sends" and "rank 3 receives"."""
    position: int
    """Its number in the lane, from 1."""
    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}" if self.line else self.what


class _Instruction(NamedTuple):
    kind: str
    subject: str
    """The stream or, for "event", the event."""
    number: int
    """How often the event was recorded before, or the number of the launch in its communicator."""
    event: str = ""
    calls: tuple[NcclCall, ...] = ()


class Report(NamedTuple):
    """What `check` has found."""

    ranks: int
    calls: int
    """Calls compared; a call that several ranks make together counts once."""
    problems: list[str]


class _Recording:
    def __init__(self, path: Path) -> None:
        self.name = path.name.replace("rank", "rank ")
        self.places: dict[str, tuple[int, int]] = {}
        """The number of this rank in each communicator, and the size of the communicator."""
        self.calls: defaultdict[Lane, defaultdict[str, list[NcclCall]]] = defaultdict(lambda: defaultdict(list))
        self.commands = list[_Instruction]()
        recorded, launch, at_launch = Counter[str](), ("", ""), 0
        for line in path.open():
            match line.rstrip("\n").split("\t"):
                case "host", group, number, size, what, at:
                    self.places.setdefault(group, (int(number), int(size)))
                    lane = group, "" if number == "-1" else _CREATION
                    self.commands.append(_Instruction("host", "", 0, calls=(self._call(lane, "", what, at),)))
                case "call", group, between, side, what, at, stream, number:
                    call = self._call((group, between), side, what, at)
                    if launch == (launch := (group, number)):  # both are between ncclGroupStart and ncclGroupEnd
                        before = self.commands[at_launch]
                        self.commands[at_launch] = before._replace(calls=(*before.calls, call))
                    else:
                        at_launch = len(self.commands)
                        self.commands.append(_Instruction("call", stream, recorded[group], group, (call,)))
                        recorded[group] += 1
                case kind, subject, event:
                    recorded[event] += kind == "record"
                    self.commands.append(
                        _Instruction(kind, subject, recorded[subject if kind == "event" else event], event)
                    )

    def _call(self, lane: Lane, side: str, what: str, line: str) -> NcclCall:
        side = f"{self.name} {side}".strip()
        calls = self.calls[lane][side]
        calls.append(NcclCall(lane, side, len(calls) + 1, what, line))
        return calls[-1]


def _replay(recordings: list[_Recording], lanes: Mapping[Lane, Mapping[str, object]]) -> list[NcclCall] | None:
    """Run all hosts and streams until nothing can move. Return the calls that wait then; None if all are complete."""
    queues = {(each.name, ""): deque(each.commands) for each in recordings}  # of the host, then of each stream
    done, reached = Counter[tuple[str, str]](), defaultdict[tuple[Lane, int], set[str]](set)

    def waits(rank: str, command: _Instruction) -> bool:
        for call in command.calls:
            reached[call.lane, call.position].add(call.side)
        met = all(reached[call.lane, call.position] >= lanes[call.lane].keys() for call in command.calls)
        match command.kind:
            case "call":
                return not met or done[rank, command.event] < command.number
            case "event":
                return done[rank, command.subject] < command.number
            case "stream":
                return bool(queues.get((rank, command.subject)))
            case "device":
                return any(queue for (of, stream), queue in queues.items() if of == rank and stream)
        return not met or (command.kind == "wait" and done[rank, command.event] < command.number)

    moves = True
    while moves:
        moves = False
        for (rank, stream), queue in [*queues.items()]:
            while queue and ((not stream and queue[0].kind in _ON_STREAM) or not waits(rank, queue[0])):
                command, moves = queue.popleft(), True
                if not stream and command.kind in _ON_STREAM:
                    queues.setdefault((rank, command.subject), deque()).append(command)
                elif command.kind in ("call", "record"):
                    done[rank, command.event] = max(
                        done[rank, command.event], command.number + (command.kind == "call")
                    )
    left = [queue[0] for queue in queues.values() if queue]
    return [call for command in left for call in command.calls] if left else None


def check(folder: Path | str, *, all_ranks: bool = True) -> Report:
    """Check the recordings in a folder. With `all_ranks=False`, some ranks of the job have none."""
    ranks = sorted(map(_Recording, Path(folder).glob("rank*")), key=lambda each: (len(each.name), each.name))
    members = {group: [each for each in ranks if group in each.places] for rank in ranks for group in rank.places}
    names = {group: " and ".join(each.name for each in of) for group, of in members.items()}
    lanes: dict[Lane, dict[str, list[NcclCall]]] = {lane: {} for rank in ranks for lane in rank.calls}
    for (group, between), sides in lanes.items():
        for rank in members[group]:  # a side without calls is a side, too
            place = str(rank.places[group][0])
            verbs = [verb for verb, at in zip(("sends", "receives"), between.split(">"), strict=False) if at == place]
            for side in [f"{rank.name} {verb}" for verb in verbs] if ">" in between else [rank.name]:
                sides[side] = rank.calls[group, between][side]
    problems = [
        f"only {names[group]} create a communicator of {of[0].places[group][1]} ranks"
        for group, of in members.items()
        if all_ranks and len(of) != of[0].places[group][1]
    ]
    for (group, _), sides in lanes.items():
        for number, calls in enumerate(zip_longest(*sides.values()), 1):
            if len({call and call.what for call in calls}) > 1:
                found = "; ".join(f"{side}: {call or 'nothing'}" for side, call in zip(sides, calls, strict=True))
                problems.append(f"communicator of {names[group]}, call {number}: {found}")
                break
    if not problems and (waiting := _replay(ranks, lanes)) is not None:
        found = "; ".join(
            f"{each.side} waits in call {each.position} of {names[each.lane[0]]}: {each}" for each in waiting
        )
        problems.append(f"deadlock: {found}")
    compared = sum(max(map(len, sides.values())) for (_, between), sides in lanes.items() if between != _CREATION)
    return Report(len(ranks), compared, problems)


if __name__ == "__main__":
    report = check(sys.argv[1])
    print(*report.problems, f"{report.ranks} ranks, {report.calls} calls, {len(report.problems)} problems", sep="\n")
    sys.exit(3 if report.problems else 0)
