"""Choose which ranks run out of memory in a sweep, and where."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.fault_injection import FaultInjector
from torchtune_adaptive.engine.step import StepRunner

Plain = TypeVar("Plain")


@dataclass(frozen=True)
class Scenario:
    """A line of the table of cases: the ranks that run out of memory, and when."""

    name: str
    _: KW_ONLY
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    """Initial rows per microbatch; four samples are two microbatches of two rows."""
    again: str = "never"
    """When a second failure occurs: "never", in the "retry" or in the "drain"."""
    first_pass: bool = False
    """Fail in the very first step of the model."""
    reduce_once: bool = False
    """Reduce-scatter gradients only in the last microbatch of a step, until a rank runs out of memory."""
    stride: int = 1
    """Step size of the exhaustive sweep; 1 tries every operation."""


def ways_to_fail(plain: Plain, others: Mapping[str, dict[str, Any]]) -> Iterator[Plain]:
    """Yield variants of a case: other ranks, a second failure, the first pass, and `others` (changes by name)."""
    ways: dict[str, dict[str, Any]] = {
        "first pass": {"first_pass": True},
        "rank 0": {"failing": (0,), "stride": 5},
        "both ranks": {"failing": (0, 1), "stride": 7},
        "retry too": {"rows": 4, "again": "retry", "stride": 7},
        "drain too": {"rows": 4, "again": "drain", "stride": 7},
    }
    for name, changes in {**ways, **others}.items():
        yield replace(plain, name=f"{plain.name}, {name}", **changes)


def operations_of(runner: StepRunner[Any], run: Callable[[int], object], step: int, case: Scenario) -> list[str]:
    """Collective: list the operations of the first failing rank inside this runner while `run` runs the step."""
    with FaultInjector(runner).count(rank=dist.get_rank(), step=step) as faults:
        run(step)
    names = [faults.operations]
    dist.broadcast_object_list(names, src=case.failing[0])
    return names[0]


def fail_there(faults: FaultInjector, case: Scenario, step: int, place: int) -> None:
    """Inject the fault. Ranks that fail in the same step do so in different places."""
    for number, rank in enumerate(case.failing):
        faults.fail_at(rank=rank, step=step, operation=max(1, place - 17 * number))
        if case.again == "retry":
            faults.fail_at(rank=rank, step=step, operation=37 * place % 900 + 1)
        elif case.again == "drain":
            faults.fail_in_drain(rank=rank, step=step, operation=5 * place % 60 + 1)


def as_dtensor_does(what: str) -> Exception:
    """Return the error that DTensor raises if one of its operations fails."""
    error = RuntimeError(f"{what}\n\nSharding propagation failed for aten.mm.default")
    error.__cause__ = torch.OutOfMemoryError(what)
    return error


def over_ranks(mine: float) -> float:
    """Collective: return the sum over ranks."""
    total = torch.tensor(float(mine), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
