"""Runs a function on several gloo ranks, each a process of its own, and never longer than it may."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

IMPORTS_S = 60.0
"""What a fresh process may take before its function even starts, on a busy machine of two cores."""


class RankFailed(AssertionError):
    """A rank raised, died or was still running when the time was over."""


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """`function(*args)` on every rank, with torchrun's environment; the results in order of rank."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, bool, Any]] = context.Queue()
    port = free_ports(1)[0]
    ranks = [
        context.Process(target=_rank_main, args=(rank, world_size, port, function, args, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, results, time.monotonic() + IMPORTS_S + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    """Ports for as many process groups, one after another: a port is not free again at once."""
    with ExitStack() as open_sockets:
        probes = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _collect(ranks: list[Any], results: Any, deadline: float) -> list[Any]:
    returned: dict[int, Any] = {}
    while len(returned) < len(ranks):
        try:
            rank, succeeded, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in returned]
            if dead:
                raise RankFailed(f"rank {dead[0]} died with exit code {ranks[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(ranks))) - set(returned))
                raise RankFailed(f"ranks {missing} hung: not done in time") from None
            continue
        if not succeeded:
            raise RankFailed(f"rank {rank} raised:\n{value}")
        returned[rank] = value
    return [returned[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    try:
        import torch

        torch.set_num_threads(1)
        results.put((rank, True, function(*args)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test reports it
        results.put((rank, False, traceback.format_exc()))
