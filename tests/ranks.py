"""Runs a function on several gloo ranks, each a process of its own, and never longer than it may."""

import faulthandler
import multiprocessing
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Forked from a server that has already imported torch and torchtune: a rank starts in a fraction of a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.warm"])
_ROOT = Path(__file__).parents[1]
_STARTING = threading.Lock()
"""Threads share one working directory."""

_MOST_GROUPS, _NEXT_PORTS = 100, "TORCHTUNE_ADAPTIVE_TEST_PORTS"
PATIENCE = 4
"""How much longer things may take here than on two idle cores: only what hangs takes longer than that."""


class RankFailed(AssertionError):
    """A rank raised or died."""


class RanksHung(AssertionError):
    """Some rank was still running when the time was over."""


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60, in_group: bool = True
) -> list[Any]:
    """`function(*args)` on every rank of a gloo process group; what it returned, in order of rank.

    Like torchrun, it ends all ranks as soon as one has failed. With `in_group=False` the function joins a group itself.
    `timeout_s` is for an idle machine.
    """
    timeout_s *= PATIENCE
    ports = free_ports(1 if in_group else _MOST_GROUPS)
    processes: list[BaseProcess] = []
    results: dict[int, Connection] = {}
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = started(_rank_main, rank, world_size, ports, timeout_s, in_group, function, args, sender)
        sender.close()
        processes.append(process)
        results[rank] = receiver
    try:
        return _collect(results, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def started(main: Callable[..., None], *args: Any) -> BaseProcess:
    """`main(*args)` in a forked process."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    process = _CONTEXT.Process(target=main, args=args, daemon=True)
    with _STARTING:
        here = Path.cwd()
        os.chdir(_ROOT)  # where the server finds what it is to import, if this is what starts it
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(here)
        process.start()
    return process


def _collect(results: dict[int, Connection], deadline: float) -> list[Any]:
    returned: dict[int, Any] = {}
    while pending := {results[rank]: rank for rank in results if rank not in returned}:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksHung(f"ranks {sorted(pending.values())} were still running when the time was over")
        failed: dict[int, str] = {}
        for connection in ready:
            rank = pending[connection]
            try:
                succeeded, value = connection.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not succeeded:
                failed[rank] = value
            returned[rank] = value
        if failed:  # on a crowded machine, one that has lost a peer may be heard at the same time as that peer
            rank = min(failed, key=lambda rank: "RanksPartedError" in failed[rank])
            raise RankFailed(f"rank {rank} raised:\n{failed[rank]}")
    return [returned[rank] for rank in sorted(returned)]


def _rank_main(
    rank: int,
    world_size: int,
    ports: list[int],
    timeout_s: float,
    in_group: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sender: Connection,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    if not in_group:
        os.environ[_NEXT_PORTS] = " ".join(map(str, ports[1:]))
    # Show where a rank dies of a native error, and where a hung one is, which ends even if the parent is gone.
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if in_group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        result = function(*args)
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while a peer still communicates
        sender.send((True, result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        sender.send((False, traceback.format_exc()))
    # Threads of gloo would be joined at exit, also those that wait for a peer that is gone.
    os._exit(0)


def meet_anew() -> None:
    """In a rank that joins groups itself, one after another: the next one meets at a port of its own, since a port is
    not free again at once. `demo_config` calls it."""
    if _NEXT_PORTS in os.environ:
        port, *others = os.environ[_NEXT_PORTS].split()
        os.environ.update({"MASTER_PORT": port, _NEXT_PORTS: " ".join(others)})


def free_ports(count: int) -> list[int]:
    """Ports below those that the system gives to connections, which would take them before their turn comes; never one
    that tests running beside these may choose."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ExitStack() as open_sockets:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(12_000 + worker, 32_000, workers)
            probe = open_sockets.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("", port))  # on all interfaces, as a store listens
                ports.append(port)
        return ports
