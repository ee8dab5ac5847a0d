"""A long run under memory pressure: memory changes on every rank, operations fail at random, and the run is stopped.

    python -m tests.recipes.long.soak [--seeds 0 1 2 3 4 5] [--epochs 8]

Two ranks train on samples of random lengths, on pairs of them, or on generated answers (PPO). Before every stage of a
step, the memory of each rank changes or an operation runs out of memory. Halfway, the run ends after a checkpoint, and
other processes resume it. It has to end by itself; each sample has to count exactly once in every stage of every
epoch; and the weights have to equal, bit by bit, those of an undisturbed run with the same microbatches.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.long.memory_pressure import CALM_BYTES, LONGEST, Storm, number_of, read_cuts, stages_of
from tests.recipes.ppo.rollouts import ppo_config, saved
from tests.recipes.running import demo_config, load_ours, saved_weights
from torchtune_adaptive.engine.governor import GROWTH, RECOVERY
from torchtune_adaptive.report.journal import EVENTS_FILE
from torchtune_adaptive.rl.stages import STAGES, TRAIN_POLICY, TRAIN_VALUE
from torchtune_adaptive.tune.preference import POLICY, REFERENCE


class Kind(NamedTuple):
    recipe: str
    budget: str
    """adaptive.token_budget"""
    stages: tuple[str, ...] = ("",)


KINDS = (
    *(Kind("full", "null"), Kind("lora", "2048"), Kind("full", "2048")),
    *(Kind("full_dpo", "null", (REFERENCE, POLICY)), Kind("lora_dpo", "4096", (REFERENCE, POLICY))),
    Kind("full_ppo", "null", STAGES),
)
"""By seed."""
SAMPLES, PROMPTS, PER_STEP, PPO_EPOCHS = 512, 208, 16, 2
"""PPO: 13 iterations per epoch, 104 in the whole soak, with this many updates per iteration."""


class Weather(NamedTuple):
    """A variant of the soak."""

    seed: int
    epochs: int = 8
    samples: int | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.seed % len(KINDS)]

    @property
    def generates(self) -> bool:
        return self.kind.recipe == "full_ppo"

    @property
    def size(self) -> int:
        return self.samples or (PROMPTS if self.generates else SAMPLES)

    @property
    def steps(self) -> int:
        return self.epochs * self.size // PER_STEP

    @property
    def middle(self) -> int:
        """The step before which the run is stopped, the first one of an epoch."""
        return self.epochs // 2 * self.size // PER_STEP + 1


def config_of(weather: Weather, folder: Path, *overrides: str) -> Any:
    common = (
        *(f"dataset.seed={weather.seed}", f"dataset.samples={weather.size}", "shuffle=True", "clip_grad_norm=1.0"),
        *("batch_size=8", "gradient_accumulation_steps=1", "resume_from_checkpoint=auto"),
        *("adaptive.regrow_after=6", f"adaptive.token_budget={weather.kind.budget}", *overrides),
    )
    if weather.generates:
        answers = (f"num_steps={weather.epochs * weather.size}", "max_generated_tokens=8")
        return ppo_config(
            folder, *answers, "ppo_batch_size=8", "forward_batch_size=8", f"ppo_epochs={PPO_EPOCHS}", *common
        )
    dataset = f"numbered{'_pairs' * (REFERENCE in weather.kind.stages)}"
    where = f"dataset._component_=tests.recipes.long.memory_pressure.{dataset}"
    lengths = (where, f"tokenizer.max_seq_len={LONGEST}", f"epochs={weather.epochs}")
    return demo_config(weather.kind.recipe, folder, *lengths, *common)


def train(weather: Weather, folder: Path, stop_before: int | None) -> None:
    """Collective: train to this step, or to the end."""
    recipe = load_ours(weather.kind.recipe)(config_of(weather, folder, f"adaptive.memory_limit={CALM_BYTES}B"))
    recipe.setup()
    stages = stages_of(recipe)
    with Storm(recipe, weather.seed, stages, splits_of(folder)):
        train_until(recipe, next(iter(stages.values())), stop_before)


def train_undisturbed(weather: Weather, folder: Path, reference: Path) -> None:
    """Collective: train the same steps in the same microbatches, without a limit, failure or stop."""
    recipe = load_ours(weather.kind.recipe)(config_of(weather, reference))
    recipe.setup()
    cuts = defaultdict(deque)
    for cut in read_cuts(splits_of(folder)):
        cuts[cut.step, cut.stage].append(cut.microbatches)

    def run_as_cut(name: str, runner: Any, samples: Sequence[Any], *, step: int, **_: Any) -> Any:
        by_number = {number_of(sample): sample for sample in samples}
        return runner.attempt([[by_number[number] for number in rows] for rows in cuts[step, name].popleft()])[0]

    for name, runner in stages_of(recipe).items():
        runner.run = partial(run_as_cut, name, runner)
    recipe.train()
    recipe.cleanup()


def splits_of(folder: Path) -> Path:
    return folder / f"splits-{dist.get_rank()}.jsonl"


def check_samples(weather: Weather, folder: Path) -> None:
    """Check that each sample counted exactly once in every stage of every epoch; and each rollout in every stage of
    every iteration, in training once per update.
    """
    seen: Counter[tuple[int, str, int]] = Counter()
    steps_per_period, numbers = (1, PER_STEP) if weather.generates else (weather.size // PER_STEP, weather.size)
    for cut in (cut for rank in (0, 1) for cut in read_cuts(folder / f"splits-{rank}.jsonl")):
        period = (cut.step - 1) // steps_per_period
        seen.update((period, cut.stage, number) for rows in cut.microbatches for number in rows)
    times = dict.fromkeys(weather.kind.stages, 1)
    if weather.generates:
        times |= {TRAIN_VALUE: PPO_EPOCHS, TRAIN_POLICY: PPO_EPOCHS}
    periods = range(weather.steps // steps_per_period)
    assert seen == {
        (period, stage, number): times[stage] for period in periods for stage in times for number in range(numbers)
    }


def check_pressure(weather: Weather, kinds: Counter[tuple[str, str]]) -> None:
    """Check that memory was short in every stage, and that limits grew again."""
    hit = [kinds[RECOVERY, stage] for stage in weather.kind.stages]
    # after a failed growth, a stage waits twice as long, so a stage that fails often recovers less often
    assert min(hit) > weather.steps / 40, f"this was no storm: {kinds}"
    assert sum(hit) > weather.steps / 20, f"this was no storm: {kinds}"
    assert all(kinds[GROWTH, stage] > weather.steps / 50 for stage in weather.kind.stages), f"it had no end: {kinds}"


def soak(weather: Weather, folder: Path) -> str:
    """Run the whole soak; raise if any check fails."""
    began = time.monotonic()
    stormy, fair = folder / "stormy", folder / "fair"
    timeout_s = 60 + 60 * weather.epochs
    run_on_ranks(2, train, weather, stormy, weather.middle, timeout_s=timeout_s, in_group=False)
    run_on_ranks(2, train, weather, stormy, None, timeout_s=timeout_s, in_group=False)
    check_samples(weather, stormy)
    run_on_ranks(2, train_undisturbed, weather, stormy, fair, timeout_s=timeout_s, in_group=False)
    read = saved if weather.generates else saved_weights
    ours, theirs = (read(path, weather.epochs - 1) for path in (stormy, fair))
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys()
    assert not different, f"weights differ: {different}"
    events = [json.loads(line) for line in (stormy / "out" / EVENTS_FILE).read_text().splitlines()]
    kinds = Counter((event["kind"], event.get("stage") or "") for event in events)
    recoveries, growths = (sum(kinds[kind, stage] for stage in weather.kind.stages) for kind in (RECOVERY, GROWTH))
    check_pressure(weather, kinds)
    return (
        f"seed {weather.seed} ({weather.kind.recipe}, token budget {weather.kind.budget}): {weather.steps} steps, "
        f"{recoveries} recoveries, grown back {growths} times, resumed once; every sample exactly once an "
        f"epoch, weights bitwise equal ({time.monotonic() - began:.0f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(len(KINDS))])
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(soak(Weather(seed, options.epochs), Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
