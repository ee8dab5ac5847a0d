"""Explain a hang: which ranks wait, where, what the others do instead, and the likely cause."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_rehearsal.formatting import ranks_named
from gpu_rehearsal.hangs.replay import NcclCall, Replay, Waiting

_UNUSED = "Expected to have finished reduction"
"""Part of the error that DDP raises in the next forward on a rank that used other parameters than its peers."""
ALL = "all ranks"
"""The description of the default group."""


class Ended(NamedTuple):
    """How a rank has ended."""

    error: str
    """Empty if the script ended without one."""
    lines: str


def explain(replay: Replay, ended: Mapping[str, Ended]) -> dict[str, Any]:
    """Return the waits, what other ranks do instead, and the likely cause; empty if nothing waits."""
    if not replay.waiting:
        return {}
    groups: dict[tuple[object, ...], list[Waiting]] = {}
    for each in replay.waiting:
        groups.setdefault((each.call.lane, each.call.position, each.call.what, each.call.line), []).append(each)
    stuck = {each.call.rank for each in replay.waiting}
    missed = {other.rank for each in replay.waiting for other in each.others} - stuck
    creators = {name for each in replay.waiting for name in replay.members(each.call.lane[0])}
    missed = {each for each in missed if each} | {name for name in ended if "" in missed and name not in creators}
    others: dict[tuple[str, str], list[str]] = {}
    for name in sorted(missed):
        how = ended.get(name, Ended("", ""))
        last = max((calls[-1] for calls in replay.recordings[name].calls.values() if calls),
                   key=lambda call: call.order, default=None) if name in replay.recordings else None  # fmt: skip
        does, at = (f"raised {how.error}", how.lines) if how.error else ("ended without a call", "")
        if not how.error and last:
            does, at = f"ended; its last call: {last.verb} {last.what}".replace(":  ", ": "), last.line
        others.setdefault((does, at), []).append(name)
    return {
        "waits": [_wait(replay, waiting) for waiting in sorted(groups.values(), key=len, reverse=True)],
        "others": [{"ranks": _numbers(names), "does": does, **_place(at)} for (does, at), names in others.items()],
        "cause": next(filter(None, _causes(replay, ended)), ""),
    }


def _wait(replay: Replay, waiting: Sequence[Waiting]) -> dict[str, Any]:
    call = waiting[0].call
    members = _numbers(replay.members(call.lane[0]))
    description = replay.description(call.lane[0])
    name = re.sub("^mesh_", "mesh dimension ", description) if description not in ("", "undefined") else ""
    waits_for = {other.rank for each in waiting for other in each.others} - {"", *(each.call.rank for each in waiting)}
    return {
        "ranks": _numbers([each.call.rank for each in waiting]), "for_ranks": _numbers([*waits_for]),
        "communicator": name, "members": members, "call": f"{call.verb} {call.what}".strip(), "number": call.position,
        **_place(call.line),
    }  # fmt: skip


def _place(lines: str) -> dict[str, Any]:
    places = lines.split(" < ") if lines else []
    return {"lines": places, "source": _source(places[0]) if places else ""}


def _numbers(names: Sequence[str]) -> list[int]:
    return sorted(int(name.split()[1]) for name in names)


def _source(place: str) -> str:
    file, _, line = place.rpartition(":")
    return linecache.getline(file, int(line)).strip()


def verdict(hang: Mapping[str, Any]) -> str:
    """Return the first line of the report."""
    first = hang["waits"][0]
    others = ranks_named(first["for_ranks"]) if first["for_ranks"] else "other ranks"
    at = f" at {first['lines'][0]}" if first["lines"] else ""
    return f"hangs: {ranks_named(first['ranks'])} {_verb(first['ranks'], 'wait')} for {others}{at}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"


def as_lines(hang: Mapping[str, Any]) -> list[str]:
    """Return the report, which has the content of the JSON."""
    found = list[str]()
    for each in hang["waits"]:
        name, ranks, members = each["communicator"], ranks_named(each["ranks"]), ranks_named(each["members"])
        where = name if name == ALL else f"{name or 'communicator'} ({members})"
        found += [f"{ranks} {_verb(each['ranks'], 'wait')} in {where}, call {each['number']}: {each['call']}"]
        found += _place_lines(each)
    for each in hang["others"]:
        found += [f"{ranks_named(each['ranks'])} {each['does']}", *_place_lines(each)]
    return [*found, f"likely cause: {hang['cause'] or 'unknown'}"]


def _place_lines(each: Mapping[str, Any]) -> list[str]:
    led = f" (from {', '.join(each['lines'][1:])})" if len(each["lines"]) > 1 else ""
    return [f"    at {each['lines'][0]}: {each['source']}{led}"] if each["lines"] else []


def _causes(replay: Replay, ended: Mapping[str, Ended]) -> Iterator[str]:
    """Yield possible causes, the likeliest first; "" where an explanation does not apply."""
    missing = [(waiting.call, other) for waiting in replay.waiting for other in waiting.others]
    stuck = {each.call.rank: each.call for each in replay.waiting}
    yield from (_error(other.rank, ended.get(other.rank)) for _, other in missing if other.rank not in stuck)
    met = [(call, other.call) for call, other in missing if other.call]
    yield from (_difference(call, other) for call, other in met)
    yield _order([call for call, other in met if other.what == call.what])
    for call, other in missing:
        if ">" in call.lane[1] and not other.call:
            verb = "receive" if call.verb == "sends" else "send"
            yield f"{call.rank} {call.verb} a message, and {other.rank} has no {verb} for it"
    for explained in (_branch, _left_loop):
        for call, other in missing:
            for mine, found in replay.pairs(call, other.rank):
                theirs = found or stuck.get(other.rank)
                yield explained(replay, mine, theirs, other.rank)
                yield explained(replay, theirs, mine, call.rank) if theirs else ""
    lanes = {call.lane[0]: call for call, other in missing if other.rank in stuck}
    yield _order([*lanes.values()] if len(lanes) > 1 else [])


def _error(rank: str, how: Ended | None) -> str:
    """Return the cause if the rank has raised an error."""
    if how is None or not how.error:
        return ""
    if _UNUSED in how.error:
        return f"{rank} used other parameters than its peers: pass find_unused_parameters=True to DDP"
    at = f" at {how.lines.split(' < ')[0]}" if how.lines else ""
    return f"{rank} raised {how.error}{at}, and the others wait for it"


def _difference(call: NcclCall, other: NcclCall) -> str:
    """Return the cause if the ranks pass different tensors to the same function at the same line."""
    (kind, mine), (their_kind, theirs) = (_kind_and_tensor(each.what) for each in (call, other))
    if call.line != other.line or kind != their_kind or mine == theirs:
        return ""
    what = "types" if mine[0] == theirs[0] else "numbers of elements"
    return f"the ranks pass different {what}: {call.rank} {call.what}, {other.rank} {other.what}"


def _kind_and_tensor(what: str) -> tuple[str, tuple[str, str]]:
    found = re.match(r"(.*) of (\d+) (\w+)", what)
    return (found[1], (found[2], found[3])) if found else (what, ("", ""))


def _order(calls: Sequence[NcclCall]) -> str:
    """Return the cause if ranks wait for each other in these calls."""
    if not calls:
        return ""
    if all(">" in call.lane[1] for call in calls):
        return "ranks send to each other before they receive: use batch_isend_irecv"
    return "the ranks use communicators in different orders: make these calls in the same order on all ranks"


class _Block(NamedTuple):
    """An `if`, or a loop, around a line."""

    place: str
    is_loop: bool
    part: str
    """For an `if`: "body" or "else"."""
    source: str


def _branch(replay: Replay, mine: NcclCall, theirs: NcclCall | None, rank: str) -> str:
    """Return the cause if a call is in a branch that the other rank has not taken."""
    there = {*_blocks(theirs.line)} if theirs else set()
    lines = replay.recordings[rank].lines if rank in replay.recordings else set()
    if mine.line.split(" < ")[0] in lines:
        return ""
    for block in _blocks(mine.line):
        if not block.is_loop and block not in there:
            only = [name for name, each in replay.recordings.items() if mine.line.split(" < ")[0] in each.lines]
            branch = block.source if block.part == "body" else f"else of {block.source}"
            at = mine.line.split(" < ")[0]
            ranks = ranks_named(_numbers(only))
            return f"this line runs at {at} only on {ranks}, in the branch `{branch}` at {block.place}"
    return ""


def _left_loop(_: Replay, mine: NcclCall, theirs: NcclCall | None, rank: str) -> str:
    """Return the cause if a call is in a loop that the other rank has left."""
    there = {*_blocks(theirs.line)} if theirs else set()
    for block in _blocks(mine.line):
        if block.is_loop and block not in there:
            return (f"{rank} left the loop `{block.source}` at {block.place} before {mine.rank}: it has fewer batches, "
                    "a break or return ended it, or a continue skipped the call")  # fmt: skip
    return ""


@functools.cache
def nodes_of(file: str) -> list[Any]:
    """Return the nodes of a file's syntax tree."""
    try:
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except (SyntaxError, ValueError):
        return []


def _blocks(lines: str) -> Iterator[_Block]:
    """Yield the blocks around the lines that led to a call, from the innermost."""
    for place in lines.split(" < ") if lines else ():
        file, _, number = place.rpartition(":")
        line = int(number)
        nodes = (each for each in nodes_of(file) if isinstance(each, ast.If | ast.For | ast.While))
        for node in sorted(nodes, key=lambda each: -each.lineno):
            for part in ("body", "orelse"):
                statements = getattr(node, part)
                if statements and statements[0].lineno <= line <= (statements[-1].end_lineno or 0):
                    at = f"{file}:{node.lineno}"
                    yield _Block(at, not isinstance(node, ast.If), part, _source(at).removesuffix(":"))
