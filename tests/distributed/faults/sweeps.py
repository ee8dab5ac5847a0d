"""The sweep: run out of memory at every operation of a step, and compare the gradients.

`make faults` tries all scenarios on gloo, `make test-nccl` those that a null device can run.
"""

import gc
import logging
import sys
from importlib import import_module
from typing import NamedTuple

import torch

from tests.distributed.faults.bench import Bench, over_ranks
from tests.distributed.faults.recipes import RecipeBench
from tests.distributed.faults.scenarios import RecipeStage, Scenario, TrainerRun
from tests.distributed.models import computes
from tests.ranks import RankFailed, RanksHung, run_on_ranks


class Outcome(NamedTuple):
    injected: int = 0
    recovered: int = 0
    hung: int = 0
    wrong: int = 0

    @property
    def all_recovered(self) -> bool:
        return self.injected == self.recovered > 0 and not self.hung and not self.wrong

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in zip(FIGURES, self, strict=True))


FIGURES = ("injected", "recovered", "hung", "wrong gradient")
"""Names of the fields of an outcome in records of results."""


def sweep(case: Scenario, at_most: int = sys.maxsize, only_collectives: bool = False, shift: int = 0) -> Outcome:
    """Collective: try every operation of a step, `at_most` evenly spread ones, or only those around collectives.

    On a null device, which computes no gradients, they are not compared.
    """
    logging.disable(logging.WARNING)  # the runner reports every recovery
    if isinstance(case.model, TrainerRun):
        return Outcome(*import_module("tests.hf.trainers").sweep(case, at_most, shift))
    # new memory is filled with NaN: a rank that fails in its first pass must not compute with it
    torch.use_deterministic_algorithms(case.first_pass and computes(), warn_only=True)
    bench = RecipeBench(case) if isinstance(case.model, RecipeStage) else Bench(case)
    expected = {rows: bench.undisturbed(rows) for rows in (4, 2, 1)} if computes() else {}
    places = _places(bench.operations(), case.stride, at_most, only_collectives, shift)
    runner = bench.new_runner()
    if not case.first_pass:
        bench.disturbed(runner, None)
        bench.warm_up(runner)
    gc.collect()
    gc.freeze()  # releasing memory collects garbage, and torch has many objects
    injected = recovered = wrong = 0
    for place in places:
        if case.first_pass:
            runner = bench.new_runner()
        if case.reduce_once:
            runner.close()
            runner = bench.new_runner()
            bench.warm_up(runner, place)
        step, fired_here = bench.disturbed(runner, place)
        fired = over_ranks(fired_here)
        injected += fired > 0
        # gradients that were reduced once are the first to give way, and the limit stays
        recovered += fired > 0 and (runner.recoveries > 0 if case.reduce_once else runner.limit.rows < case.rows)
        wrong += over_ranks(bool(expected) and not step.same_as(expected[runner.limit.rows])) > 0
    return Outcome(injected, recovered, 0, wrong)


def _places(operations: list[str], stride: int, at_most: int, only_collectives: bool, shift: int) -> list[int]:
    """Return the numbers of operations, starting at 1. Shifts cycle through the operations that a sample skips."""
    if only_collectives:  # before a collective is issued, and while it waits after peers have matched it
        collectives = [index for index, name in enumerate(operations, 1) if name.startswith("c10d")]
        return sorted({index + after for index in collectives for after in (0, 1, 2)})
    step = max(stride, -(-len(operations) // at_most))
    return list(range(1 + shift % step, len(operations) + 1, step))


def outcome_of(case: Scenario, at_most: int, shift: int, timeout_s: float) -> Outcome:
    """Run a sweep in new processes; count hangs and errors instead of raising them."""
    try:
        outcomes = run_on_ranks(case.world_size, sweep, case, at_most, False, shift, timeout_s=timeout_s)
    except RanksHung as error:
        print(f"{case.name}: {error}", file=sys.stderr)
        return Outcome(hung=1)
    except RankFailed as error:
        print(f"{case.name}: {error}", file=sys.stderr)
        return Outcome(injected=1)
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]
