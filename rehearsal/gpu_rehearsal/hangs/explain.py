"""Explain a hang: which ranks wait, where, what the others do instead, and the likely cause."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_rehearsal.formatting import ranks_named
from gpu_rehearsal.hangs.replay import SPLITS, NcclCall, Replay, Waiting

_UNUSED = "Expected to have finished reduction"
"""Part of the error that DDP raises in the next forward on a rank that used other parameters than its peers."""
_RANK = re.compile(r"rank(?!s)|main_process|is_(main|master|first|last)|coord", re.IGNORECASE)
_EXITS = {ast.Return: "return", ast.Continue: "continue", ast.Break: "break", ast.Raise: "raise"}
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
        where = f"the group of {ALL}" if name == ALL else f"{name or 'communicator'} ({members})"
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
    yield from (_new_group(replay, each.call) for each in replay.waiting)
    met = [(call, other.call) for call, other in missing if other.call]
    yield from (_difference(call, other) for call, other in met)
    yield _order([call for call, other in met if other.what == call.what])
    for call, other in missing:
        if ">" in call.lane[1] and not other.call:
            verb = "receive" if call.verb == "sends" else "send"
            yield f"{call.rank} {call.verb} a message, and {other.rank} has no {verb} for it"
    pairs = [
        (mine, found or stuck.get(other.rank), other.rank)
        for call, other in missing
        for mine, found in replay.pairs(call, other.rank)
    ]
    sides = [(mine, theirs, rank) for mine, theirs, rank in pairs]
    sides += [(theirs, mine, mine.rank) for mine, theirs, _ in pairs if theirs]
    choices = [(call, rank, _choices(replay, call, other, rank)) for call, other, rank in sides]
    yield _decision(replay, choices)
    for mine, theirs, rank in pairs:
        yield _left_loop(replay, mine, theirs, rank)
        yield _left_loop(replay, theirs, mine, mine.rank) if theirs else ""
    lanes = {call.lane[0]: call for call, other in missing if other.rank in stuck}
    same_line = len(lanes) > 1 == len({call.line for call in lanes.values()})
    yield _order([*lanes.values()] if same_line and not any(found for *_, found in choices) else [])


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
    if call.line != other.line or kind != their_kind or call.what == other.what:
        return ""
    same = [one == theirs[at] for at, one in enumerate(mine)]
    what = (
        "numbers of elements"
        if not same[0]
        else "types"
        if not same[1]
        else "roots"
        if "root" in call.what
        else "reductions"
    )
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
    """An `if`, or a loop, around a line; or an `if` before it that leaves the block."""

    place: str
    is_loop: bool
    part: str
    """For an `if`: "body" or "else"; for one before the line: the statement that leaves."""
    source: str
    by_rank: bool
    """True if the condition depends on the rank."""
    inside: tuple[str, ...]
    """The lines of this part."""


def _new_group(replay: Replay, call: NcclCall) -> str:
    """Return the cause if only members of a group create it. NCCL may split the communicator of all ranks for this."""
    created = re.match(r"new_group of ranks \[(.*)\]", call.what)
    sides = (calls for _, calls in replay.lanes[call.lane].values() if len(calls) >= call.position)
    if created and any(calls[call.position - 1].what != call.what for calls in sides):
        return "the ranks create different groups: call new_group for every group on all ranks, in the same order"
    calling = {name for name, each in replay.recordings.items() if len(each.calls[call.lane, ""]) >= call.position}
    named = created[1].split(", ") if created else []
    names = {f"rank {each}" for each in named} or (calling if call.what == SPLITS else set())
    if not names or calling - names or names == {*replay.recordings}:
        return ""
    others = ranks_named(_numbers([*({*replay.recordings} - names)]))
    return f"{others} must call new_group for this group, too"


def _choices(replay: Replay, call: NcclCall, other: NcclCall | None, rank: str) -> list[_Block]:
    """Return the conditions by which a rank may have missed this call; `other` is the call where it is instead."""
    there = [*_blocks(other.line)] if other else []
    made = replay.recordings[rank].lines if rank in replay.recordings else set()
    found = list[_Block]()
    for block in _blocks(call.line):
        if block in there and block.inside:
            break  # both ranks are in this block
        if not block.is_loop and block not in there and (block.by_rank or made.isdisjoint(block.inside)):
            found.append(block)
    return found


def _decision(replay: Replay, choices: Sequence[tuple[NcclCall, str, list[_Block]]]) -> str:
    """Return the cause if a single condition can have separated the ranks: the one that depends on the rank."""
    found = {block: (call, rank) for call, rank, blocks in reversed(choices) for block in blocks}
    opposite = {block.place for block in found if block.part == "orelse"}
    sure = [block for block in found if block.part == "body" and block.place in opposite]  # the ranks are in both parts
    sure = sure or [block for block in found if block.by_rank] or [*found]
    if len(sure) != 1 or not (sure[0].inside or sure[0].by_rank):
        return ""
    (block,) = sure
    call, rank = found[block]
    line = call.line.split(" < ")[0]
    if not block.inside:
        left = rank or "a rank"
        return f"`{block.source}` at {block.place} ends in a {block.part}, before the call at {line}: {left} left there"
    branch = block.source if block.part == "body" else f"else of {block.source}"
    runs = _numbers([name for name, each in replay.recordings.items() if line in each.lines])
    who = f"{line} runs only on {ranks_named(runs)}"
    if rank and int(rank.split()[1]) in runs:  # no rank: it is not known which one a host waits for
        who = f"{rank} runs the line at {line} less often than {call.rank}"
    return f"{who}, in the branch `{branch}` at {block.place}"


def _left_loop(replay: Replay, mine: NcclCall, theirs: NcclCall | None, rank: str) -> str:
    """Return the cause if a call is in a loop that the other rank has left, after it made a call there."""
    there = {*_blocks(theirs.line)} if theirs else set()
    calls = replay.recordings[rank].calls.values() if rank in replay.recordings else ()
    before = (call for each in calls for call in each if theirs is None or call.order < theirs.order)
    made = {line for call in before for line in call.line.split(" < ")}
    for block in _blocks(mine.line):
        if block.is_loop and block not in there and not made.isdisjoint(block.inside):
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


@functools.cache
def _names_of_rank(file: str) -> set[str]:
    """Return the names in a file whose values depend on the rank: those that are called so, and what follows from
    them."""
    found = {name for node in nodes_of(file) for name in _names(node) if _RANK.search(name)}
    size = 0
    while size != (size := len(found)):
        for node in nodes_of(file):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.NamedExpr):
                value = node.iter if isinstance(node, ast.For) else node.value
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if value and found & _all_names(value):
                    found |= {name for each in targets for name in _all_names(each)}
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the name of a node that has one."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield node.id if isinstance(node, ast.Name) else node.attr


def _all_names(node: ast.AST) -> set[str]:
    return {name for each in ast.walk(node) for name in _names(each)}


def _blocks(lines: str) -> Iterator[_Block]:
    """Yield the blocks around the lines that led to a call, and branches before them that leave, from the innermost."""
    for place in lines.split(" < ") if lines else ():
        file, _, number = place.rpartition(":")
        line, names = int(number), _names_of_rank(file)
        nodes = (each for each in nodes_of(file) if hasattr(each, "body") and hasattr(each, "lineno"))
        for node in sorted(nodes, key=lambda each: -each.lineno):
            for part in ("body", "orelse"):
                statements = getattr(node, part, [])
                if not isinstance(statements, list) or not statements:
                    continue
                first, last = statements[0].lineno, statements[-1].end_lineno or 0
                if not first <= line <= last:
                    continue
                for each in reversed([each for each in statements if (each.end_lineno or 0) < line]):
                    by_rank = isinstance(each, ast.If) and bool(names & _all_names(each.test))
                    if isinstance(each, ast.If) and (leaves := _exit_of(each)) and (by_rank or leaves != "raise"):
                        at = f"{file}:{each.lineno}"
                        yield _Block(at, False, leaves, _source(at).removesuffix(":"), by_rank, ())
                if isinstance(node, ast.If | ast.For | ast.While):
                    at, inside = f"{file}:{node.lineno}", tuple(f"{file}:{each}" for each in range(first, last + 1))
                    by_rank = isinstance(node, ast.If) and bool(names & _all_names(node.test))
                    yield _Block(at, not isinstance(node, ast.If), part, _source(at).removesuffix(":"), by_rank, inside)
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
                break


def _exit_of(node: ast.If) -> str:
    """Return how a branch leaves the block around it; "" if it does not."""
    last = [statements[-1] for statements in (node.body, node.orelse) if statements]
    return next((name for each in last for kind, name in _EXITS.items() if isinstance(each, kind)), "")
