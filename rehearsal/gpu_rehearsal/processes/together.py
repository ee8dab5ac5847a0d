"""Run several ranks of a command together, in processes that are forked after torch is imported."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path

import torch

from gpu_rehearsal.errors import CannotRehearse
from gpu_rehearsal.hangs.explain import Ended, explain
from gpu_rehearsal.hangs.replay import Replay
from gpu_rehearsal.processes.server import end_with_parent
from gpu_rehearsal.processes.sharing import share_imports, share_shardings
from gpu_rehearsal.recording.calls import start_recording
from gpu_rehearsal.report.record import COMPARED

GRACE_S = 10
"""After a rank has failed, the others are killed if they have not ended within these seconds."""
FEW = 4
"""More ranks than these are forked after the libraries of the script are imported."""
IDLE_S = 1
"""If the ranks make no call for these seconds, it is checked whether they wait for each other."""
SLOW_S = 5
"""If some of them do, but not all, the others may be slow. They get this time to reach their next call. If they
compute, they get it for each rank of a core."""


def fork_ranks(ranks: Sequence[int], folder: Path, command: Sequence[str]) -> tuple[int, Callable[[], None]]:
    """Fork a process for each rank. In such a process, return its rank, and a function to call after its last step.

    A rank continues after its last step, because others may wait for it, until all ranks have reached theirs. The
    calling process waits for this, writes the exit status of each rank into its record, and then ends.
    """
    if torch.cuda.is_initialized():
        raise CannotRehearse("the command uses CUDA before it starts the ranks: add --ranks")
    for record in filter(Path.is_file, folder.iterdir()):  # delete the record of this process
        record.unlink()
    if len(ranks) > FEW:
        share_imports(command)
    calls = folder / "calls"
    calls.mkdir()
    finished = mmap(-1, len(ranks))
    (folder / "shardings").mkdir()
    share_shardings(folder / "shardings")
    running = dict[int, int]()
    for at, rank in enumerate(ranks):
        if (process := os.fork()) == 0:
            end_with_parent()
            os.environ["NULL_CUDA_RECORD"] = str(calls)
            start_recording()
            return rank, partial(finished.__setitem__, at, 1)
        running[process] = at
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks receive it, too, and end
    statuses = _wait(running, ranks, finished, folder)
    replay = Replay(calls, running=[_name(rank) for rank, status in statuses.items() if status is None])
    ended = {_name(rank): _ending(folder / str(rank)) for rank, status in statuses.items() if status is not None}
    refused = any(each.error.startswith("CannotRehearse") for each in ended.values())
    killed = any(status is not None and status < 0 for status in statuses.values())
    hang = {} if killed or refused or all(statuses.values()) else explain(replay, ended)
    (folder / COMPARED).write_text(json.dumps({"collectives": replay.calls, "hang": hang, "kinds": replay.kinds}))
    os._exit(0)


def _wait(running: dict[int, int], ranks: Sequence[int], finished: mmap, folder: Path) -> dict[int, int | None]:
    """Wait until all ranks have ended or taken their last step, or wait for each other. Return their exit statuses.

    Ranks that still run are killed; they have the status None.
    """
    statuses, calls = dict[int, int | None](), folder / "calls"

    def ended(process: int, status: int | None) -> None:
        at = running.pop(process)
        statuses[ranks[at]] = status
        code = 0 if finished[at] else -signal.SIGKILL if status is None else status
        with (folder / str(ranks[at])).open("a") as record:
            record.write(json.dumps({"kind": "process", "status": code}) + "\n")

    until_s, size, idle_since, used_s = float("inf"), -1, 0.0, 0.0
    waiting: set[str] | None = None
    ranks_per_core = max(1.0, len(ranks) / (os.cpu_count() or 1))
    while running:
        before = size, len(running)
        while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] in running:
                ended(found[0], code := os.waitstatus_to_exitcode(found[1]))
                until_s = min(until_s, time.monotonic() + GRACE_S * ranks_per_core) if code else until_s
        size = sum(path.stat().st_size for path in calls.glob("rank*"))
        if before != (size, len(running)):
            idle_since, used_s, waiting = time.monotonic(), sum(map(_cpu_s, running)), None
        names = {_name(ranks[at]) for at in running.values()}
        idle_s = time.monotonic() - idle_since
        computes = sum(map(_cpu_s, running)) - used_s > idle_s / 10
        slow_s = SLOW_S * (ranks_per_core if computes else 1)
        if waiting is None and idle_s > (slow_s if computes else IDLE_S):
            waiting = {each.call.rank for each in Replay(calls, running=names).waiting}
        hangs = bool(waiting) and (waiting == names or idle_s > slow_s)
        if hangs or time.monotonic() > until_s or all(finished[at] for at in running.values()):
            for process in [*running]:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                ended(process, None)
        else:
            time.sleep(0.05)
    return statuses


def _cpu_s(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _name(rank: int) -> str:
    return f"rank {rank}"


def _ending(record: Path) -> Ended:
    """Return how a rank has ended, from its record."""
    found = [json.loads(line) for line in record.read_text().splitlines() if line.endswith("}")]
    end: dict[str, str] = next((each for each in found if each["kind"] == "end"), {})
    return Ended(end.get("error") or "", end.get("lines", ""))
