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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import RESUME, stopped_before_epoch
from tests.recipes.long.memory_pressure import CALM_BYTES, LONGEST, Cut, Storm, number_of, read_cuts, stages_of
from tests.recipes.ppo.rollouts import ppo_config, saved
from tests.recipes.running import demo_config, load_ours, saved_weights
from torchtune_adaptive.engine.governor import GROWTH, RECOVERY
from torchtune_adaptive.report.journal import EVENTS_FILE
from torchtune_adaptive.rl.stages import STAGES, TRAIN_POLICY, TRAIN_VALUE
from torchtune_adaptive.tune.preference import POLICY, REFERENCE

VARIANTS = (
    *(("full", "null"), ("lora", "2048"), ("full", "2048")),
    *(("full_dpo", "null"), ("lora_dpo", "4096"), ("full_ppo", "null")),
)
"""Recipe and token budget, by seed."""
PPO_SAMPLES, PPO_EPOCHS = 208, 2
"""Prompts: 13 iterations per epoch, 104 in the whole soak; and the number of updates per iteration."""


class Weather(NamedTuple):
    """A variant of the soak."""

    seed: int
    epochs: int = 8
    samples: int = 512

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // 16

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def middle(self) -> int:
        """The epoch before which the run is stopped."""
        return self.epochs // 2

    @property
    def kind(self) -> str:
        return VARIANTS[self.seed % len(VARIANTS)][0]

    @property
    def budget(self) -> str:
        return VARIANTS[self.seed % len(VARIANTS)][1]

    @property
    def of_pairs(self) -> bool:
        return self.kind.endswith("_dpo")

    @property
    def of_rollouts(self) -> bool:
        return self.kind.endswith("_ppo")

    @property
    def stages(self) -> tuple[str, ...]:
        if self.of_rollouts:
            return STAGES
        return (REFERENCE, POLICY) if self.of_pairs else ("",)


def config_of(weather: Weather, folder: Path, *overrides: str) -> Any:
    adaptive = ("adaptive.regrow_after=6", f"adaptive.token_budget={weather.budget}")
    if weather.of_rollouts:
        return ppo_config(
            folder,
            *(f"dataset.seed={weather.seed}", f"dataset.samples={weather.samples}", "shuffle=True"),
            *(f"num_steps={weather.epochs * weather.samples}", "max_generated_tokens=8", "clip_grad_norm=1.0"),
            *("batch_size=8", "ppo_batch_size=8", "forward_batch_size=8", f"ppo_epochs={PPO_EPOCHS}"),
            *("resume_from_checkpoint=auto", *adaptive),
            *overrides,
        )
    return demo_config(
        weather.kind,
        folder,
        f"dataset._component_=tests.recipes.long.memory_pressure.numbered{'_pairs' * weather.of_pairs}",
        f"dataset.seed={weather.seed}",
        f"dataset.samples={weather.samples}",
        f"tokenizer.max_seq_len={LONGEST}",
        "batch_size=8",
        "gradient_accumulation_steps=1",
        "clip_grad_norm=1.0",
        f"epochs={weather.epochs}",
        "shuffle=True",
        *adaptive,
        *overrides,
    )


def train(weather: Weather, folder: Path, first: int) -> None:
    """Collective: train to the middle, or from there to the end."""
    resume = [RESUME] if first and not weather.of_rollouts else []
    recipe = load_ours(weather.kind)(config_of(weather, folder, f"adaptive.memory_limit={CALM_BYTES}B", *resume))
    recipe.setup()
    storm = Storm(recipe, weather.seed, stages_of(recipe), splits_of(folder))
    with storm, nullcontext() if first else stopped_before_epoch(weather.middle):
        recipe.train()
        recipe.cleanup()


def train_undisturbed(weather: Weather, folder: Path, reference: Path) -> None:
    """Collective: train the same steps in the same microbatches, without a limit, failure or stop."""
    recipe = load_ours(weather.kind)(config_of(weather, reference))
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
    """Check that each sample counted exactly once in every stage of every epoch."""
    cuts = [cut for rank in (0, 1) for cut in read_cuts(folder / f"splits-{rank}.jsonl")]
    if weather.of_rollouts:
        check_rollouts(weather, cuts)
        return
    for stage in weather.stages:
        for epoch in range(weather.epochs):
            first = epoch * weather.steps_per_epoch
            steps = range(first + 1, first + weather.steps_per_epoch + 1)
            own = [cut for cut in cuts if cut.stage == stage and cut.step in steps]
            seen = Counter(number for cut in own for rows in cut.microbatches for number in rows)
            assert seen == Counter(range(weather.samples)), f"{stage}, epoch {epoch}: {seen.most_common(3)}"


def check_rollouts(weather: Weather, cuts: Sequence[Cut]) -> None:
    """Check that each rollout counted exactly once in every stage of every iteration, and once per update in
    training.
    """
    seen: Counter[tuple[int, str, int]] = Counter()
    for cut in cuts:
        seen.update((cut.step, cut.stage, number) for rows in cut.microbatches for number in rows)
    times = {stage: PPO_EPOCHS if stage in (TRAIN_VALUE, TRAIN_POLICY) else 1 for stage in STAGES}
    steps, numbers = range(1, weather.steps + 1), range(16)
    assert seen == {(step, stage, number): times[stage] for step in steps for stage in STAGES for number in numbers}


def check_pressure(weather: Weather, kinds: Counter[tuple[str, str]]) -> None:
    """Check that memory was short in every stage, and that limits grew again."""
    hit = [kinds[RECOVERY, stage] for stage in weather.stages]
    # after a failed growth, a stage waits twice as long, so a stage that fails often recovers less often
    assert min(hit) > weather.steps / 40, f"this was no storm: {kinds}"
    assert sum(hit) > weather.steps / 20, f"this was no storm: {kinds}"
    assert all(kinds[GROWTH, stage] > weather.steps / 50 for stage in weather.stages), f"it had no end: {kinds}"


def soak(weather: Weather, folder: Path) -> str:
    """Run the whole soak; raise if any check fails."""
    began = time.monotonic()
    stormy, fair = folder / "stormy", folder / "fair"
    timeout_s = 60 + 60 * weather.epochs
    run_on_ranks(2, train, weather, stormy, 0, timeout_s=timeout_s, in_group=False)
    run_on_ranks(2, train, weather, stormy, weather.middle, timeout_s=timeout_s, in_group=False)
    check_samples(weather, stormy)
    run_on_ranks(2, train_undisturbed, weather, stormy, fair, timeout_s=timeout_s, in_group=False)
    read = saved if weather.of_rollouts else saved_weights
    ours, theirs = (read(path, weather.epochs - 1) for path in (stormy, fair))
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys()
    assert not different, f"weights differ: {different}"
    events = [json.loads(line) for line in (stormy / "out" / EVENTS_FILE).read_text().splitlines()]
    kinds = Counter((event["kind"], event.get("stage") or "") for event in events)
    recoveries, growths = (sum(kinds[kind, stage] for stage in weather.stages) for kind in (RECOVERY, GROWTH))
    check_pressure(weather, kinds)
    return (
        f"seed {weather.seed} ({weather.kind}, token budget {weather.budget}): {weather.steps} steps, "
        f"{recoveries} recoveries, grown back {growths} times, resumed once; every sample exactly once an "
        f"epoch, weights bitwise equal ({time.monotonic() - began:.0f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(len(VARIANTS))])
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            weather = Weather(seed, options.epochs)
            weather = weather._replace(samples=PPO_SAMPLES) if weather.of_rollouts else weather
            print(soak(weather, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
