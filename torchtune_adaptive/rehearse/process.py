"""Starts a rehearsal: a process on a null device, watched until it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from torchtune_adaptive.null_cuda import environment
from torchtune_adaptive.rehearse.answer import Rehearsed
from torchtune_adaptive.rehearse.gpus import Gpu
from torchtune_adaptive.rehearse.launchers import ONE_MACHINE

CONTEXT_BYTES, CONTEXT_AND_NCCL_BYTES = 2**30, 3 * 2**30
"""What no tensor can have of a card: the CUDA context and libraries, and with several ranks NCCL's buffers."""
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def overhead_of(ranks: int) -> int:
    return CONTEXT_AND_NCCL_BYTES if ranks > 1 else CONTEXT_BYTES


def rehearse(
    command: Sequence[str],
    gpu: Gpu,
    *,
    ranks: int = 1,
    rank: int = 0,
    overhead_bytes: int,
    steps: int,
    output: IO[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Rehearsed:
    """Runs a command as one rank of many; raises NullCudaError where there is no null device.

    What the command prints goes to `output`, by default to standard error.
    """
    usable_bytes = gpu.memory - overhead_bytes
    card = environment(memory=usable_bytes, devices=min(ranks, ONE_MACHINE), capability=gpu.capability)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        record = Path(folder) / "steps.jsonl"
        stage = [sys.executable, "-m", "torchtune_adaptive.rehearse.stage"]
        asked = [str(each) for each in (record, rank, ranks, steps)]
        with _leaving_nothing():
            script = subprocess.Popen(
                [*stage, *asked, *command],
                env={**os.environ, **card, **(variables or {})},
                stdout=output or sys.stderr,
                stderr=output,
                preexec_fn=partial(ctypes.CDLL(None).prctl, _END_WITH_PARENT, signal.SIGKILL),
            )
            try:
                status = _ended(script)
            finally:
                script.kill()
                script.wait()
        about = {"usable_bytes": usable_bytes, "overhead_bytes": overhead_bytes, "rank": rank, "ranks": ranks}
        return Rehearsed.read(record, **about, status=status)


def _ended(script: subprocess.Popen[bytes]) -> int:
    """Ctrl-C ends the script, and then the answer is of the steps until then; the second one kills it."""
    try:
        return script.wait()
    except KeyboardInterrupt:
        script.send_signal(signal.SIGINT)
    try:
        return script.wait()
    except KeyboardInterrupt:
        script.kill()
        return script.wait()


@contextmanager
def _leaving_nothing() -> Iterator[None]:
    """While open, a signal that asks this process to end does so by an exception, past what tidies up."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
