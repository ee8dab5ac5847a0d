"""A long run under memory pressure: memory changes on every rank, operations fail at random, and the run is stopped.

    python -m tests.recipes.long.soak [--seeds 0 1 2 3 4 5] [--epochs 8] [--steps 5000]

Two ranks train on samples of random lengths, on pairs of them, or on generated answers (PPO). Before every stage of a
step, the memory of each rank changes or an operation runs out of memory. Halfway, the run ends after a checkpoint, and
other processes resume it. It has to end by itself; each sample has to count exactly once in every stage of every
epoch; and the weights have to equal, bit by bit, those of an undisturbed run with the same microbatches.

Then long runs of tiny steps with many saves. Regularly read the memory of the process, the number of objects that
Python's collector tracks, and the bytes alive on the device (on a CPU, according to our meter). Compare the last third
with the middle third; caches fill in the first.
"""

import argparse
import gc
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.comparisons import Finished
from tests.recipes.crash.runs import EXTRA, Variant
from tests.recipes.long.memory_pressure import (
    CALM_BYTES,
    KIB,
    LONGEST,
    Storm,
    memories_of,
    number_of,
    read_cuts,
    stages_of,
)
from tests.recipes.ppo.rollouts import STAGES, ppo_config
from tests.recipes.running import demo_config, load_ours, train_until
from tests.timeline import lines_of
from torchtune_adaptive.checkpoints.store import find_checkpoints
from torchtune_adaptive.engine.limit_policy import GROWTH, RECOVERY
from torchtune_adaptive.loop.metrics import EVENTS_FILE
from torchtune_adaptive.objectives.preference import POLICY, REFERENCE
from torchtune_adaptive.rl.stages import TRAIN_POLICY, TRAIN_VALUE


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
    lengths = (f"tokenizer.max_seq_len={LONGEST}", f"epochs={weather.epochs}")
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
    ours, theirs = (Finished(path).weights() for path in (stormy, fair))
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys()
    assert not different, f"weights differ: {different}"
    kinds = Counter((event["kind"], event.get("stage") or "") for event in lines_of(stormy / "out" / EVENTS_FILE))
    recoveries, growths = (sum(kinds[kind, stage] for stage in weather.kind.stages) for kind in (RECOVERY, GROWTH))
    check_pressure(weather, kinds)
    return (
        f"seed {weather.seed} ({weather.kind.recipe}, token budget {weather.kind.budget}): {weather.steps} steps, "
        f"{recoveries} recoveries, grown back {growths} times, resumed once; every sample exactly once an "
        f"epoch, weights bitwise equal ({time.monotonic() - began:.0f} s)"
    )


# runs of tiny steps with many saves: their memory must not grow
ROWS, EPOCHS, READINGS = 2, 2, 30
SAVE_EVERY, KEEP = 25, 2
MODEL = ("num_layers=1", "embed_dim=32", "intermediate_dim=32")


class Reading(NamedTuple):
    process_bytes: int
    objects: int
    device_bytes: int


MOST_GROWTH = Reading(process_bytes=8 * KIB * KIB, objects=150, device_bytes=0)
"""Allowed growth from the middle third to the last. In 80 steps on a busy machine, a process has grown by 4.1 MiB."""
DEALT_BYTES = 4 * KIB
"""Samples read ahead under a budget stay on the device for varying times. In 5,000 steps: 3 bytes per step."""


CASES = (Variant("full", 1), Variant("lora", 1), Variant("full", 2, "tokens"))
"""Several ranks agree, and deal samples under a token budget."""


def growth(readings: Sequence[Reading]) -> Reading:
    """Return the growth of the minimum from the middle third to the last; temporary memory of a save does not count."""
    third = len(readings) // 3
    before, last = (map(min, zip(*part, strict=True)) for part in (readings[third : 2 * third], readings[-third:]))
    return Reading(*(end - begin for begin, end in zip(before, last, strict=True)))


def read_memory(case: Variant, folder: Path, steps: int, each_step: Callable[[], object]) -> list[Reading]:
    """Collective: run; return the readings of each rank."""
    recipe = load_ours(case.kind)(tiny_config_of(case, folder, steps))
    every, readings = max(1, steps // READINGS), list[Reading]()
    recipe.setup()
    run, meters = recipe.runner.run, memories_of(recipe.runner)

    def run_and_read(samples: Any, *, step: int, **options: Any) -> Any:
        each_step()
        result = run(samples, step=step, **options)
        if step % every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            process_bytes = pages * resource.getpagesize()
            readings.append(Reading(process_bytes, len(gc.get_objects()), meters[-1].live_bytes))
        return result

    recipe.runner.run = run_and_read
    recipe.train()
    recipe.cleanup()
    return readings


def tiny_config_of(case: Variant, folder: Path, steps: int) -> Any:
    return demo_config(
        case.kind,
        folder,
        *(f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in MODEL),
        *(f"dataset.samples={steps // EPOCHS * ROWS * case.ranks}", f"tokenizer.max_seq_len={LONGEST}"),
        *(f"batch_size={ROWS}", "gradient_accumulation_steps=1", f"epochs={EPOCHS}", "shuffle=True"),
        *(f"save_every_n_steps={SAVE_EVERY}", f"keep_last_n_checkpoints={KEEP}"),
        "adaptive.memory_limit=64MiB",
        *EXTRA[case.limit],
    )


def endure(case: Variant, folder: Path, steps: int, each_step: Callable[[], object] = bool) -> str:
    """Run the case; raise if memory grows. Call `each_step` before every step."""
    began = time.monotonic()
    by_rank = run_on_ranks(
        case.ranks, read_memory, case, folder / "run", steps, each_step, timeout_s=60 + steps // 10, in_group=False
    )
    grown = Reading(*map(max, zip(*map(growth, by_rank), strict=True)))
    message = (
        f"{case}: {steps} steps, {steps // SAVE_EVERY} saves; in the last third a process has grown by "
        f"{grown.process_bytes // KIB} KiB, by {grown.objects} objects, and by {grown.device_bytes} bytes on the device"
    )
    assert len([each for each in find_checkpoints(folder / "run" / "out") if each.manifest]) == KEEP
    most = MOST_GROWTH._replace(device_bytes=DEALT_BYTES) if case.limit == "tokens" else MOST_GROWTH
    assert all(measured <= limit for measured, limit in zip(grown, most, strict=True)), message
    return f"{message} ({time.monotonic() - began:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[*range(len(KINDS))])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5000, help="of the runs that check for growth; 0: none")
    options = parser.parse_args()
    runs = [partial(soak, Weather(seed, options.epochs)) for seed in options.seeds]
    for run in [*runs, *(partial(endure, case, steps=options.steps) for case in CASES if options.steps)]:
        with tempfile.TemporaryDirectory() as folder:
            print(run(folder=Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
