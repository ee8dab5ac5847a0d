"""Tensor parallelism through the full recipe: every operation of its first step runs out of memory, on 2 x 2 ranks.

python -m tests.recipes.long.tensor_sweep                 every operation, on the four ranks in turn
python -m tests.recipes.long.tensor_sweep --at-most 50    50 operations, evenly spread

Each step is compared, bit by bit, with one that nothing happened to: gradients, loss, target tokens and the state of
the random generator. From place to place tokens change and lengths do not, so that what a failure leaves behind for
tokens of its own meets others. Scripts are forgotten in between, so that each failure is finished by the shadow.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.faults.failing import over_ranks
from tests.distributed.faults.sweeps import Outcome, outcome_of
from tests.distributed.models import Gradients, gradients_of, same_gradients
from tests.recipes.running import SGD, demo_config, load_ours
from torchtune_adaptive.comm.tensor import TensorLedger
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE
from torchtune_adaptive.testing import FaultInjector

RANKS = 4
TENSOR = (
    *SGD,
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "clip_grad_norm=null",  # which stock fails with
    "dataset.samples=24",
    "batch_size=2",
    "adaptive.regrow_after=0",
)
RECOVERING = (*TENSOR, "adaptive.recover_from_oom=True")
ONE_LAYER = ("model.num_layers=1", "checkpointer.sizes.num_layers=1")
SHORT = (
    "gradient_accumulation_steps=1",
    "tokenizer.max_seq_len=32",
    "dataset.train_on_input=True",  # all of so short a sample is prompt
)
"""A step that is one microbatch, so that every operation of it can be paid for."""
IGNORED = -100


class _Swept(Exception):
    """The first step of a recipe has been swept, which is all that was to be done."""


def sweep(folder: Path, at_most: int, *overrides: str) -> Outcome:
    """Collective: lets so many evenly spread operations of the recipe's first step run out of memory."""
    logging.disable(logging.WARNING)  # the runner reports every recovery
    recipe = load_ours("full")(demo_config("full", folder, *RECOVERING, *ONE_LAYER, *overrides))
    recipe.setup()
    found: list[Outcome] = []

    def swept(samples: Sequence[Any], **_: Any) -> Any:
        found.append(sweep_step(Bench(recipe, run), samples, at_most))
        raise _Swept

    run, recipe.runner.run = recipe.runner.run, swept
    with suppress(_Swept):
        recipe.train()
    recipe.cleanup()
    return found[0]


class Step(NamedTuple):
    """What has come of a step on this rank."""

    gradients: Gradients
    loss_sum: Tensor
    target_tokens: int
    random_state: Tensor

    def same_as(self, other: Step) -> bool:
        """Bitwise."""
        return (
            same_gradients(self.gradients, other.gradients)
            and torch.equal(self.loss_sum, other.loss_sum)
            and self.target_tokens == other.target_tokens
            and torch.equal(self.random_state, other.random_state)
        )


class Bench:
    """A recipe whose first step is run again and again."""

    def __init__(self, recipe: Any, run: Callable[..., Any]) -> None:
        self.runner, self._model, self._run = recipe.runner, recipe.model, run
        self._fresh = recipe.runner.state_dict()
        self.ledger: TensorLedger[Any] = recipe.runner.ledger

    def step(self, samples: Sequence[Any], rows: int, faults: FaultInjector | None = None) -> Step:
        """Collective: as the first one, in microbatches of so many rows."""
        self._model.zero_grad(set_to_none=True)
        self.runner.load_state_dict({**self._fresh, "size": rows})
        self.ledger.scripts.forget()
        torch.manual_seed(0)
        with faults or nullcontext():
            result = self._run(samples, step=0)
        return Step(gradients_of(self._model), result.loss_sum, result.target_tokens, torch.get_rng_state())

    def operations(self, samples: Sequence[Any]) -> list[int]:
        """Collective: how many there are to fail, of each rank."""
        faults = FaultInjector(self.runner).count(rank=dist.get_rank(), step=0)
        self.step(samples, 2, faults)
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(faults.operations))
        return counts

    def disturbed(self, samples: Sequence[Any], place: int, failing: int) -> tuple[Step, bool]:
        """Collective: a step, and whether an operation of it ran out of memory."""
        faults = FaultInjector(self.runner).fail_at(rank=failing, step=0, operation=place)
        step = self.step(samples, 2, faults)
        return step, over_ranks(faults.fired) > 0


def sweep_step(bench: Bench, samples: Sequence[Any], at_most: int) -> Outcome:
    """Collective."""
    sets = (samples, [with_other_tokens(sample) for sample in samples])
    expected = [{rows: bench.step(each, rows) for rows in (2, 1)} for each in sets]
    assert all(step.target_tokens > 0 for steps in expected for step in steps.values())
    check_keys_and_shadow(bench.ledger, samples[0])
    counts = bench.operations(samples)
    gc.collect()
    gc.freeze()  # releasing memory collects garbage, and torch is a lot to look through
    injected = recovered = wrong = 0
    for number, place in enumerate(range(1, max(counts) + 1, -(-max(counts) // at_most))):
        able = [rank for rank, count in enumerate(counts) if count >= place]
        step, fired = bench.disturbed(sets[number % 2], place, able[number % len(able)])
        rows = bench.runner.limit.rows
        injected += fired
        recovered += fired and rows == 1
        wrong += over_ranks(not step.same_as(expected[number % 2][rows])) > 0
    return Outcome(injected, recovered, 0, wrong)


def with_other_tokens(sample: dict[str, list[int]]) -> dict[str, list[int]]:
    """As long, with labels in the same places."""
    return {
        "tokens": [_other(token) for token in sample["tokens"]],
        "labels": [label if label == IGNORED else _other(label) for label in sample["labels"]],
    }


def _other(token: int) -> int:
    return (token + 17) % VOCAB_SIZE


def check_keys_and_shadow(ledger: TensorLedger[Any], sample: dict[str, list[int]]) -> None:
    """After steps in which nothing failed."""
    assert ledger.scripts, "every microbatch has left its script"
    assert not ledger.shadow.is_built, "a shadow is built when it is first needed"
    unlearned = {**sample, "labels": [IGNORED] * len(sample["labels"])}
    assert ledger.scripts.key_of([sample]) != ledger.scripts.key_of([unlearned])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--at-most", type=int, default=sys.maxsize, help="operations to try")
    arguments.add_argument("--timeout", type=float, default=1800, help="seconds, on an idle machine")
    options = arguments.parse_args()
    name, began = "tensor parallelism through the full recipe", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        outcome = outcome_of(
            name, RANKS, sweep, run, options.at_most, *SHORT, timeout_s=options.timeout, in_group=False
        )
    told = ", ".join(f"{figure} {count}" for figure, count in outcome._asdict().items())
    print(f"{told}  {name} ({time.monotonic() - began:.0f} s)")
    return 0 if outcome.all_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
