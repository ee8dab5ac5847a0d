"""Measure the cost of an out-of-memory error: a recovered step, compared with a restart from a checkpoint.

Goal: less than 2 step times lost, at any point of a step. Rank 1 of 2 fails once at a chosen point of a step. A pair is
an undisturbed step and the disturbed step that follows it, which is repeated with half the rows.

For the restart, the adaptive recipe is killed after its first checkpoint and resumed through `tune run`. The cost is
the time from the start of the command to the end of the first step, minus that step. Repeated steps since the
checkpoint are not included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.overhead import SIZES
from benchmarks.results import Result
from tests.ranks import run_on_ranks
from tests.recipes.running import COMMAND_MARK, end_marked, environment
from tests.searched_model import Shape, Trained

RANKS = 2
FAILING_RANK = 1
SHAPE = Shape(vocabulary=512, dim=256, hidden=1024, layers=4, length=128)
"""Large, because a garbage collection takes 0.2 s for any model and should be short compared with a step."""
ROWS, MICROBATCHES = 8, 3
WARM_UP_STEPS, UNDISTURBED_STEPS = 1, 1


@dataclass(frozen=True)
class Point:
    """A point of a step at which memory runs out."""

    name: str
    microbatch: int
    module: Callable[[Any], nn.Module]
    in_backward: bool = False


POINTS = [
    Point("first microbatch, forward, first layer", 1, lambda model: model.layers[0]),
    Point("first microbatch, forward, head", 1, lambda model: model.head),
    Point("first microbatch, backward, middle layer", 1, lambda model: model.layers[SHAPE.layers // 2], True),
    Point("last microbatch, backward, first layer", MICROBATCHES, lambda model: model.layers[0], True),
]


class Cost(NamedTuple):
    """The cost of one out-of-memory error, in seconds."""

    step_s: float
    """Duration of an undisturbed step."""
    lost_s: float
    step_after_s: float
    """Duration of the next undisturbed step, with smaller microbatches."""


@dataclass
class Fault:
    """Injects one out-of-memory error at `point`, once it is armed."""

    point: Point
    armed: bool = False
    _microbatches: int = field(default=0, init=False)

    def watch(self, model: nn.Module) -> None:
        module = self.point.module(model)
        module.register_forward_pre_hook(self._at_forward)
        module.register_forward_hook(self._at_output)

    def _at_forward(self, *_: Any) -> None:
        self._microbatches += self.armed
        if not self.point.in_backward:
            self._fail()

    def _at_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.point.in_backward and self.armed:
            output.register_hook(lambda _: self._fail())

    def _fail(self) -> None:
        if self.armed and self._microbatches == self.point.microbatch:
            self.armed = False
            raise torch.OutOfMemoryError("injected")


def run(pairs: int) -> Result:
    rows = [measure(point, pairs) for point in POINTS]
    rows.append(measure_restart(pairs))
    note = (
        f"{RANKS} ranks, {MICROBATCHES} microbatches a step. lost: additional time of the disturbed step compared with "
        "an undisturbed one, or the time of a restart until the next step begins; in seconds, and in undisturbed steps "
        "of this model. Repeated steps since the last checkpoint are not included. step after: time of a step with the "
        "smaller microbatches after a recovery, relative to a step before it. The lost time includes a garbage "
        "collection on the failing rank, whose duration does not depend on the size of the model"
    )
    return Result(rows, note)


def measure(point: Point, pairs: int) -> dict[str, Any]:
    times = run_on_ranks(RANKS, time_recoveries, POINTS.index(point), pairs, timeout_s=60 + 30 * pairs)[0]
    return {"out of memory in": point.name, **lost(times)}


def lost(costs: Sequence[Cost]) -> dict[str, Any]:
    steps = [cost.lost_s / cost.step_s for cost in costs]
    return {
        "step s": median(cost.step_s for cost in costs),
        "lost s": median(cost.lost_s for cost in costs),
        "lost steps": median(steps),
        "lowest": min(steps),
        "highest": max(steps),
        "step after": median(cost.step_after_s / cost.step_s for cost in costs),
        "pairs": len(costs),
    }


def time_recoveries(point: int, pairs: int) -> list[Cost]:
    """Collective: time pairs of an undisturbed and a disturbed step."""
    return [_one_recovery(POINTS[point]) for _ in range(pairs)]


def _one_recovery(point: Point) -> Cost:
    """Collective: time one recovery, with a new model and limit, because recovery lowers the limit."""
    trained, fault = Trained(SHAPE, limit=ROWS), Fault(point)
    fault.watch(trained.model)
    undisturbed = [_timed_step(trained, recoveries=0) for _ in range(WARM_UP_STEPS + UNDISTURBED_STEPS)]
    fault.armed = dist.get_rank() == FAILING_RANK
    disturbed_s = _timed_step(trained, recoveries=1)
    after_s = _timed_step(trained, recoveries=0)
    trained.runner.close()
    step_s = median(undisturbed[WARM_UP_STEPS:])
    return Cost(step_s, disturbed_s - step_s, after_s)


def _timed_step(trained: Trained, recoveries: int) -> float:
    """Collective: return the seconds of a step, including the update."""
    dist.barrier()
    began = time.perf_counter()
    result = trained.runner.run([trained.sample] * (ROWS * MICROBATCHES), step=1)
    trained.update(result)
    trained.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    assert result.recoveries == recoveries, f"{result.recoveries} recoveries in a step that should have {recoveries}"
    return time.perf_counter() - began


STEPS_AN_EPOCH = 6
RECIPE = (
    "tune",
    "run",
    "--nproc_per_node",
    str(RANKS),
    "adaptive_full_finetune_distributed",
    "--config",
    "adaptive/demo/full",
    *(f"model.{size}" for size in SIZES),
    *(f"checkpointer.sizes.{size}" for size in SIZES),
    "dataset.samples=256",
    f"max_steps_per_epoch={STEPS_AN_EPOCH}",
    "epochs=3",
    "tokenizer.max_seq_len=256",
    "batch_size=2",
    "use_maximum_batch_size=False",
    "adaptive=null",
)
RESUMED = ("resume_from_checkpoint=auto",)


def measure_restart(pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        steps_of(Path(folder), "killed", count=STEPS_AN_EPOCH + 1)
        times = [_one_restart(Path(folder), f"restart-{number}") for number in range(pairs)]
    return {"out of memory in": "no recovery: restart from a checkpoint", **lost(times)}


def _one_restart(folder: Path, name: str) -> Cost:
    began = time.perf_counter()
    ended = steps_of(folder, name, *RESUMED, count=STEPS_AN_EPOCH)
    step_s = median(after - before for before, after in pairwise(ended))
    return Cost(step_s, ended[0] - began - step_s, step_s)


def steps_of(folder: Path, name: str, *overrides: str, count: int, timeout_s: float = 120) -> list[float]:
    """Start the recipe, kill it after `count` steps, and return the time at which each step ended."""
    log = folder / f"{name}.txt"
    logging = (f"metric_logger.log_dir={folder}", f"metric_logger.filename={log.name}")
    with running([*RECIPE, *logging, *overrides], folder) as process:
        deadline = time.monotonic() + timeout_s
        return [time.perf_counter() for _ in _lines(log, count, lambda: process.poll() or time.monotonic() > deadline)]


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command; at the end of the block, end it and all processes that it has started."""
    executable, mark = Path(sys.executable).parent / command[0], uuid.uuid4().hex
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            [str(executable), *command[1:]],
            cwd=folder,
            env={**environment(), COMMAND_MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        except TimeoutError as error:
            written = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
            raise TimeoutError(f"{error}: {' '.join(command)}\n{written[-4000:]}") from None
        finally:
            end_marked(COMMAND_MARK, mark)
            process.wait()


def _lines(path: Path, count: int, over: Callable[[], object]) -> Iterator[None]:
    """Yield when each of the first lines of a file has been written."""
    seen = 0
    while seen < count:
        if over():
            raise TimeoutError(f"{seen} of {count} steps were taken when the run, or the time for it, was over")
        with suppress(FileNotFoundError):
            for _ in range(seen, min(count, path.read_text(encoding="utf-8").count("\n"))):
                seen += 1
                yield
        time.sleep(0.002)
