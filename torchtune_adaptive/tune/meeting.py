"""Where the ranks of a start meet: a store that nothing of an earlier start is in."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from torchtune_adaptive.errors import RanksPartedError
from torchtune_adaptive.rehearsal import REHEARSAL
from torchtune_adaptive.text import ranks_named

GREETS_EVERY_S = 0.02


def store_of_this_start() -> dict[str, Any]:
    """Where a launcher may restart its ranks, a part of its store that holds nothing of those that died.

    torch 2.13 keeps one store for all starts, so ranks would call at the addresses of the dead. Launchers of several
    nodes count restarts each for itself, so the ranks agree on a name: each says that it is there under a name that is
    new, and rank 0 answers those names until all have heard it. What the dead have said gets an answer nobody reads.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or REHEARSAL.on:
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    name = _greeted(store, world_size) if rank == 0 else _name_from_rank_0(store, rank)
    mine = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return {"store": mine, "rank": rank, "world_size": world_size}


def _name_from_rank_0(store: Any, rank: int) -> str:
    mine = uuid.uuid4().hex
    store.set(f"there/{rank}", mine)
    name = str(store.get(f"start/{mine}").decode())
    store.set(f"{name}/heard/{rank}", "")
    return name


def _greeted(store: Any, world_size: int) -> str:
    """The name of this start, once every rank has heard it."""
    name, answered = uuid.uuid4().hex, dict.fromkeys(range(1, world_size), "")
    until_s = time.monotonic() + default_pg_timeout.total_seconds()
    while waiting := [rank for rank in answered if not store.check([f"{name}/heard/{rank}"])]:
        if time.monotonic() > until_s:
            raise RanksPartedError(f"{ranks_named(waiting)} did not join")
        for rank in waiting:
            if store.check([f"there/{rank}"]) and (there := store.get(f"there/{rank}").decode()) != answered[rank]:
                store.set(f"start/{there}", name)
                answered[rank] = there
        time.sleep(GREETS_EVERY_S)
    return name
