"""Read what NCCL's flight recorder has written in a real run, and find the ranks that wait for each other."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.hangs.explain import explain
from gpu_rehearsal.hangs.replay import NO_STREAM, Replay

_SIZES_DIFFER = re.compile("all_?to_?all|gather$|^scatter|barrier")
"""Collectives to which ranks may pass different sizes, or whose sizes torch does not record on all ranks."""
_KEYS = {"process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "input_sizes", "state"}
_OF_LIBRARIES = re.compile(r"^<|/(site|dist)-packages/|/lib/python3")


def read_dumps(where: str) -> tuple[int, int, dict[str, Any]]:
    """Return the number of dumps in a folder or with a prefix, of calls compared, and the hang; {} if there is none."""
    path = Path(where)
    found = path.iterdir() if path.is_dir() else path.parent.glob(f"{path.name}*")
    ranks = {int(number[1]): each for each in found if (number := re.search(r"(\d+)(\.\w+)?$", each.name))}
    if not ranks:
        raise ConfigError(f"{where} has no dumps: pass the folder or the prefix of files whose names end in the rank")
    dumps = {rank: _load(each) for rank, each in sorted(ranks.items())}
    first = defaultdict[str, int](int)
    """By group: the first collective that all dumps contain, because each keeps only the last ones."""
    for dump in dumps.values():
        seen = dict[str, int]()
        for group, _, entry in _entries(dump, dumps.keys()):
            if not entry["is_p2p"]:
                seen.setdefault(group, entry["collective_seq_id"])
        for group, earliest in seen.items():
            first[group] = max(first[group], earliest)
    with tempfile.TemporaryDirectory() as folder:
        for rank, dump in dumps.items():
            (Path(folder) / f"rank{rank}").write_text("".join(_lines(rank, dump, dumps.keys(), first)))
        replay = Replay(folder)
        return len(dumps), replay.calls, explain(replay, {})


class _Unpickler(pickle.Unpickler):
    """Reads numbers, texts and containers only: a pickle of another content can run any code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, as no dump does")


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        dump = json.loads(content) if content.startswith(b"{") else _Unpickler(io.BytesIO(content)).load()
        if any(not entry.keys() >= _KEYS for entry in dump["entries"]):
            raise ValueError("a call lacks some keys")
    except Exception as error:  # noqa: BLE001  a file of another kind can fail in any way
        raise ConfigError(f"{path} is not a dump of NCCL's flight recorder ({error}): pass only dumps") from None
    return dump  # type: ignore[no-any-return]


def _entries(dump: Mapping[str, Any], ranks: Any) -> Iterator[tuple[str, list[int], Mapping[str, Any]]]:
    """Yield the calls, with the name of their group, and its ranks."""
    for entry in dump["entries"]:
        name = str(entry["process_group"][0])
        listed = str(dump.get("pg_config", {}).get(name, {}).get("ranks", ""))
        members = [int(each) for each in re.findall(r"\d+", listed)] or sorted(ranks)
        if entry["profiling_name"] != "nccl:coalesced":  # its parts are entries of their own
            yield f"{name} {members}", members, entry


def _lines(rank: int, dump: Mapping[str, Any], ranks: Any, first: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of a recording (see `replay.Recording`)."""
    described = set[str]()
    for group, members, entry in _entries(dump, ranks):
        operation = str(entry["profiling_name"]).partition(":")[2]
        peers = re.fullmatch(r"(send|recv) (\d+)(->|<-)(\d+)", operation)
        between = verb = ""
        if peers:
            own, other, sends = peers[2], peers[4], peers[1] == "send"
            between, verb, operation = f"{own}>{other}" if sends else f"{other}>{own}", "receives", "a message"
            verb = "sends" if sends else verb
        if entry["state"] == "completed" if entry["is_p2p"] else entry["collective_seq_id"] < first[group]:
            continue
        if group not in described:
            described.add(group)
            text = str(entry["process_group"][1]).replace("default_pg", "all ranks")
            yield f"place\t{group}\t{members.index(rank)}\t{len(members)}\t{text}\n"
        size, kind = entry["input_sizes"], entry.get("input_dtypes")
        if size and kind and not _SIZES_DIFFER.search(operation):
            operation += f" of {math.prod(size[0])} {kind[0].lower()}"
        number = f"message {entry['p2p_seq_id']}" if entry["is_p2p"] else entry["collective_seq_id"]
        at = _place(entry.get("frames") or [])
        yield f"call\t{group}\t{between}\t{verb}\t{operation}\t{at}\t{NO_STREAM}{group}{between}\t{number}\n"


def _place(frames: list[Mapping[str, Any]]) -> str:
    own = [each for each in frames if not _OF_LIBRARIES.search(each["filename"])] or frames[:1]
    return " < ".join(f"{each['filename']}:{each['line']}" for each in own)
