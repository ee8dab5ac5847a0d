"""TRL's GRPO and RLOO: each pass before a step runs out of memory, and results are compared with stock's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("trl")


from tests.fault_injection import FaultInjector
from tests.hf.test_trainers import RANKS, even_words, of_metrics, texts, tiny_reward_model, tokenizer
from tests.ranks import run_on_ranks
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin

pytestmark = pytest.mark.timeout(900)
PASSES = ["generation", "log-probabilities", "reference log-probabilities", "reward model 1"]
GENERATING: dict[str, Any] = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "top_k": 1}
COUNTED = 2
"""The generation whose operations are counted; in each later one, one operation of each pass fails."""


class Outcome(NamedTuple):
    difference: float
    """From stock, the largest of all losses, gradient norms and weights."""
    rewards: float
    """From stock, the largest difference of the metrics, such as rewards, their standard deviation and the KL."""
    injected: dict[str, int]
    """The errors in each pass on this rank."""
    recoveries: dict[str, float]


def with_different_prompts(trainer: type) -> Any:
    """Return a trainer whose greedy answers differ within a group, because each of them has another prompt."""

    class Different(trainer):  # type: ignore[misc, valid-type]
        def _generate(self, prompts: list[str]) -> Any:
            return super()._generate([f"{prompt}w{7 * row % 31} " for row, prompt in enumerate(prompts)])

    return Different


class FailingPasses(AdaptiveMixin):
    """In each generation, one operation of each pass runs out of memory, on the ranks in turn."""

    errors = 50
    generations = 0
    kept: list[Any] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operations: dict[str, int] = {}
        self.injected = dict.fromkeys(PASSES, 0)
        self.limits: dict[str, Any] = {}
        self.kept.append(self)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.generations += 1
        runners = self._passes._runners if self.generations > 1 else {}
        step, number, ranks = self.state.global_step + 1, self.generations - COUNTED, self.args.world_size
        with ExitStack() as stack:
            faults = {name: stack.enter_context(FaultInjector(runner)) for name, runner in runners.items()}
            for name, injector in faults.items():
                runner = runners[name]
                if number == 0:
                    self.limits[name] = runner.state_dict()
                    injector.count(rank=self.args.process_index, step=step)
                elif number <= self.errors:
                    runner.load_state_dict({**runner.state_dict(), "size": self.limits[name]["size"]})
                    operation = 1 + (number - 1) * (self.operations[name] - 1) // max(1, self.errors - 1)
                    injector.fail_at(rank=number % ranks, step=step, operation=operation)
            result = super()._generate_and_score_completions(inputs)
        for name, injector in faults.items():
            if number == 0:
                self.operations[name] = len(injector.operations)
            self.injected[name] += injector.fired
        return result


def outcome(trainer: str, placement: str, generations: int, **config_options: Any) -> Outcome:
    """Collective: train with stock, then while each pass runs out of memory in each generation."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import trl

    from tests.hf.trainers import arguments, difference, tiny_llama, train, use_fsdp2

    if placement == "FSDP2":
        use_fsdp2()
    base = with_different_prompts(getattr(trl, trainer))
    config = getattr(trl, trainer.replace("Trainer", "Config"))

    def options(folder: Path) -> dict[str, Any]:
        words = tokenizer()
        tiny_llama().save_pretrained(folder / "model")  # from which TRL makes the reference model
        return {
            "model": str(folder / "model"),
            "arguments": arguments(
                folder,
                config,
                max_steps=(generations + COUNTED) * config_options.get("num_iterations", 1),
                gradient_accumulation_steps=2,
                gradient_checkpointing=False,
                bf16=False,
                **GENERATING,
                **config_options,
            ),
            "data_collator": None,
            "processing_class": words,
            "train_dataset": texts(["prompt"]),
            "reward_funcs": [tiny_reward_model(), even_words],
            "reward_processing_classes": [words, None],
        }

    FailingPasses.errors = generations
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock = train(folder, base=base, **options(folder))
        ours = train(
            folder,
            AdaptiveArguments(regrow_after=0),
            base=type("Failing", (FailingPasses, base), {}),
            **options(folder),
        )
    trained = FailingPasses.kept[-1]
    recoveries = {name: ours.column(f"oom_recoveries/{name}")[-1] for name in trained.injected}
    return Outcome(
        difference(ours, stock, least=1.0),
        of_metrics(ours.log, stock.log),
        trained.injected,
        recoveries,
    )


@pytest.mark.parametrize(
    ("trainer", "placement", "options"),
    [
        ("RLOOTrainer", "one process", {}),
        ("GRPOTrainer", "DDP", {"num_iterations": 2, "loss_type": "grpo"}),
        ("RLOOTrainer", "FSDP2", {}),
    ],
)
def test_each_pass_recovers_from_fifty_errors(trainer: str, placement: str, options: dict[str, Any]) -> None:
    errors = int(os.environ.get("ERRORS", "50"))
    outcomes: Sequence[Outcome] = run_on_ranks(
        RANKS[placement], partial(outcome, **options), trainer, placement, errors, in_group=False, timeout_s=800
    )
    print(outcomes)
    for name in PASSES:
        assert sum(each.injected[name] for each in outcomes) == errors
        assert {each.recoveries[name] for each in outcomes} == {errors}
    assert max(each.difference for each in outcomes) < 1e-5, outcomes
    assert max(each.rewards for each in outcomes) < 1e-4, outcomes
