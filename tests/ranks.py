"""Run a function on several gloo ranks, one process per rank, with a timeout."""

import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial, wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Forked from a server that has already imported torch and torchtune: a rank starts in a fraction of a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.forkserver_preload"])
_ROOT = Path(__file__).parents[1]
_STARTING = threading.Lock()
"""Threads share one working directory."""

_MOST_GROUPS, _NEXT_PORTS = 100, "TORCHTUNE_ADAPTIVE_TEST_PORTS"
PATIENCE = 4
"""Factor on all timeouts. They are given for two idle cores; only a hang takes four times longer."""
MOST_PATIENCE = 40
"""Limit of the factor on a loaded machine. After it, a rank ends itself, even if the test that started it is gone."""


class RankFailed(AssertionError):
    """A rank raised an exception or died."""


class RanksHung(AssertionError):
    """A rank was still running at the timeout."""


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60, in_group: bool = True
) -> list[Any]:
    """Run `function(*args)` on every rank of a gloo process group; return the results in order of rank.

    Like torchrun, end all ranks as soon as one fails. With `in_group=False` the function joins a group itself.
    `timeout_s` is given for an idle machine. It is extended while the machine is loaded.
    """
    ports = free_ports(1 if in_group else _MOST_GROUPS)
    processes: list[BaseProcess] = []
    results: dict[int, Connection] = {}
    with TemporaryDirectory() as folder:
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            stack = _stack_file(folder, rank)
            process = started(_rank_main, rank, world_size, ports, timeout_s, in_group, stack, function, args, sender)
            sender.close()
            processes.append(process)
            results[rank] = receiver
        try:
            return _collect(results, processes, timeout_s, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()


def on_ranks(
    world_size: int | Callable[..., int],
    timeout_s: float = 60,
    in_group: bool = True,
    setup: Callable[[], object] = bool,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test on every rank, as by `run_on_ranks`. Call `setup` on each rank before it.

    The number of ranks may be a function of the test's arguments.
    """

    def decorated(check: Callable[..., None]) -> Callable[..., None]:
        @wraps(check)
        def test(**case: Any) -> None:
            if "RANK" in os.environ:  # a rank finds this function by the name of the test
                setup()
                check(**case)
            else:
                ranks = world_size(**case) if callable(world_size) else world_size
                run_on_ranks(ranks, partial(test, **case), timeout_s=timeout_s, in_group=in_group)

        return test

    return decorated


def _stack_file(folder: str, rank: int) -> Path:
    """Return the file into which a rank writes the stack of its threads if a signal ends it."""
    return Path(folder, f"rank {rank}")


def started(main: Callable[..., None], *args: Any) -> BaseProcess:
    """Run `main(*args)` in a forked process."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    process = _CONTEXT.Process(target=main, args=args, daemon=True)
    with _STARTING:
        here = Path.cwd()
        os.chdir(_ROOT)  # if this starts the server: where the server finds the modules to import
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(here)
        process.start()
    return process


def patience() -> float:
    """Return the factor on timeouts at the current load. Ranks share the cores, and wait for messages of ranks that
    wait for a core: next to 20 busy processes on one core, a sweep took 9 times as long as before."""
    return min(MOST_PATIENCE, max(PATIENCE, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)))


def _collect(results: dict[int, Connection], processes: list[BaseProcess], timeout_s: float, folder: str) -> list[Any]:
    began, factor = time.monotonic(), 0.0
    returned: dict[int, Any] = {}
    while pending := {results[rank]: rank for rank in results if rank not in returned}:
        ready = wait(list(pending), timeout=1.0)
        if not ready:
            factor = max(factor, patience())
            if time.monotonic() < began + factor * timeout_s:
                continue
            for pid in (processes[rank].pid for rank in pending.values()):
                assert pid is not None
                os.kill(pid, signal.SIGUSR1)  # prints where the rank is
            time.sleep(0.5)
            raise RanksHung(f"ranks {sorted(pending.values())} were still running when the time was over")
        failed: dict[int, str] = {}
        for connection in ready:
            rank = pending[connection]
            try:
                succeeded, value = connection.recv()
            except EOFError:
                processes[rank].join(timeout=10)
                status = processes[rank].exitcode or 0
                end = signal.Signals(-status).name if status < 0 else f"status {status}"
                raise RankFailed(f"rank {rank} died ({end})\n{_stack_file(folder, rank).read_text()}") from None
            if not succeeded:
                failed[rank] = value
            returned[rank] = value
        # the error of a rank that lost its peer can arrive before the error of that peer, or together with it
        if failed:
            for connection in wait([each for each in pending if pending[each] not in returned], timeout=1.0):
                with suppress(EOFError):
                    succeeded, value = connection.recv()
                    if not succeeded:
                        failed[pending[connection]] = value
            first = min(failed, key=lambda rank: "CollectiveFailedError" in failed[rank])
            others = (f"\nrank {rank} raised:\n{failed[rank]}" for rank in sorted(failed.keys() - {first}))
            raise RankFailed(f"rank {first} raised:\n{failed[first]}{''.join(others)}")
    return [returned[rank] for rank in sorted(returned)]


def _rank_main(
    rank: int,
    world_size: int,
    ports: list[int],
    timeout_s: float,
    in_group: bool,
    stack: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sender: Connection,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    if not in_group:
        os.environ[_NEXT_PORTS] = " ".join(map(str, ports[1:]))
    # Print tracebacks of native errors and of hangs. Exit at the timeout even if the parent is gone.
    faulthandler.enable(stack.open("w"))
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(MOST_PATIENCE * timeout_s, exit=True)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if in_group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=MOST_PATIENCE * timeout_s))
        result = function(*args)
        if dist.is_initialized():
            dist.barrier()  # a rank must not leave while a peer still communicates
        sender.send((True, result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        sender.send((False, traceback.format_exc()))
    # Exit would join gloo's threads, including those that wait for a dead peer.
    os._exit(0)


def use_next_port() -> None:
    """Choose the next port for a rank that joins several groups in turn: a used port is not free again immediately.
    `demo_config` calls it.
    """
    if _NEXT_PORTS in os.environ:
        port, *others = os.environ[_NEXT_PORTS].split()
        os.environ.update({"MASTER_PORT": port, _NEXT_PORTS: " ".join(others)})


def free_ports(count: int) -> list[int]:
    """Return free ports below the range of ephemeral ports, where a connection could take them first. Parallel test
    workers never choose the same port.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ExitStack() as open_sockets:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(12_000 + worker, 32_000, workers)
            probe = open_sockets.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("", port))  # on all interfaces, like a store
                ports.append(port)
        return ports
