"""A long run in bad weather: memory comes and goes on every rank, operations fail at random, the run is stopped.

    python -m tests.recipes.soak [--seeds 0 1 2] [--epochs 8]

Two ranks train samples of random lengths through the recipe. Before every step the memory of each rank is set anew, or
an operation is made to run out of memory; halfway the run ends after a checkpoint, and other processes resume it. It
has to end by itself; each sample has to count exactly once in every epoch; and the weights have to be, bit by bit,
those of a run in fair weather that cut its steps into the same microbatches.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, saved_weights
from tests.recipes.stopping import stopped_before, to_resume
from torchtune_adaptive.limits.change import GROWTH, RECOVERY
from torchtune_adaptive.limits.packing import Plan
from torchtune_adaptive.record.events import EVENTS_FILE
from torchtune_adaptive.testing import FaultInjector

LONGEST, MEDIAN = 256, 48
MIB = 2**20
CALM_BYTES, LEAST_BYTES = 64 * MIB, 15 * MIB
"""Room for eight of the longest samples, and for one."""
OPERATIONS = 1500
"""Of a microbatch, about."""


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
        return ("full", "lora")[self.seed % 2]

    @property
    def budget(self) -> str:
        return ("null", "2048", "2048")[self.seed % 3]


class Numbered(Dataset[dict[str, Any]]):
    """Random tokens in samples of random lengths that know their own number."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self._seed}/{index}")
        length = max(8, min(LONGEST, math.ceil(draw.lognormvariate(math.log(MEDIAN), 0.8))))
        tokens = draw.choices(range(256), k=length)
        return {"tokens": tokens, "labels": [-100, *tokens[1:]], "number": index}


def numbered(tokenizer: Any, *, samples: int, seed: int, packed: bool = False) -> Numbered:
    """Component for a config's `dataset:`."""
    return Numbered(samples, seed)


class Storm:
    """Changes the memory of this rank, or lets an operation fail, before every step; and notes how steps were cut."""

    def __init__(self, recipe: Any, weather: Weather, splits: Path) -> None:
        self._recipe, self._runner = recipe, recipe.runner
        self._together = random.Random(f"{weather.seed}/{recipe.progress.step}")  # draws alike on all ranks
        self._alone = random.Random(f"{weather.seed}/{recipe.progress.step}/{dist.get_rank()}")
        self.faults = FaultInjector(self._runner)
        self._storm, self._left_of_spell = False, 0
        self._splits = splits
        self._run, self._runner.run = self._runner.run, self.run
        self._runner.on_plan = self.on_plan
        self._watch, recipe.watch = recipe.watch, self.watch

    def watch(self, memory: Any) -> None:
        self._memory = memory
        self._watch(memory)

    def on_plan(self, _: int, plan: Plan) -> None:
        self._last_plan = plan

    def run(self, samples: Sequence[Any], *, step: int, **options: Any) -> Any:
        """Collective: the step, in whatever comes."""
        self._memory.cap_bytes = CALM_BYTES
        event = self._together.choice(["squeeze", "strike"]) if self._stormy() else "calm"
        if event == "squeeze":
            self._memory.cap_bytes = self._alone.randrange(LEAST_BYTES, CALM_BYTES // 3)
        struck = self._together.choice([{0}, {1}, {0, 1}])
        # what is as small as can be would end the run: rightly, so it is not struck
        if event == "strike" and self._room() and dist.get_rank() in struck:
            self.faults.fail_at(rank=dist.get_rank(), step=step, operation=self._alone.randrange(1, OPERATIONS))
        result = self._run(samples, step=step, **options)
        cut = [[samples[index]["number"] for index in rows] for rows in self._last_plan]
        with self._splits.open("a") as file:
            file.write(json.dumps({"step": step, "microbatches": cut}) + "\n")
        return result

    def _stormy(self) -> bool:
        """Storms pass, and come again: in between, what has shrunk grows back."""
        if self._left_of_spell == 0:
            self._storm = not self._storm
            self._left_of_spell = self._together.randrange(*(4, 9) if self._storm else (10, 31))
        self._left_of_spell -= 1
        return self._storm

    def _room(self) -> bool:
        return bool(self._runner.limit.rows_at(LONGEST) >= 2)


def config_of(weather: Weather, folder: Path, *overrides: str) -> Any:
    adaptive = ("adaptive.regrow_after=6", f"adaptive.token_budget={weather.budget}")
    return demo_config(
        weather.kind,
        folder,
        "dataset._component_=tests.recipes.soak.numbered",
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
    """Collective: until the middle, or from there to the end."""
    resume = to_resume(weather.kind, first) if first else []
    recipe = load_ours(weather.kind)(config_of(weather, folder, f"adaptive.memory_limit={CALM_BYTES}B", *resume))
    recipe.setup()
    storm = Storm(recipe, weather, splits_of(folder))
    with storm.faults, nullcontext() if first else stopped_before(weather.middle):
        recipe.train()
        recipe.cleanup()


def train_in_fair_weather(weather: Weather, folder: Path, reference: Path) -> None:
    """Collective: the same steps in the same microbatches, without a limit, a failure or a stop."""
    recipe = load_ours(weather.kind)(config_of(weather, reference))
    recipe.setup()
    cuts = {record["step"]: record["microbatches"] for record in read_splits(splits_of(folder))}

    def run(samples: Sequence[Any], *, step: int, **_: Any) -> Any:
        by_number = {sample["number"]: sample for sample in samples}
        return recipe.runner.attempt([[by_number[number] for number in rows] for rows in cuts[step]]).result

    recipe.runner.run = run
    recipe.train()
    recipe.cleanup()


def splits_of(folder: Path) -> Path:
    return folder / f"splits-{dist.get_rank()}.jsonl"


def read_splits(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_samples(weather: Weather, folder: Path) -> None:
    """That each counted exactly once in every epoch."""
    steps = weather.steps_per_epoch
    for epoch in range(weather.epochs):
        seen: Counter[int] = Counter()
        for rank in (0, 1):
            for record in read_splits(folder / f"splits-{rank}.jsonl")[epoch * steps : (epoch + 1) * steps]:
                seen.update(number for rows in record["microbatches"] for number in rows)
        assert seen == Counter(range(weather.samples)), f"epoch {epoch}: {len(seen)} samples, {seen.most_common(3)}"


def soak(weather: Weather, folder: Path) -> str:
    """The whole of it; raises where anything is not as it should be."""
    began = time.monotonic()
    stormy, fair = folder / "stormy", folder / "fair"
    timeout_s = 60 + 60 * weather.epochs
    run_on_ranks(2, train, weather, stormy, 0, timeout_s=timeout_s, in_group=False)
    run_on_ranks(2, train, weather, stormy, weather.middle, timeout_s=timeout_s, in_group=False)
    check_samples(weather, stormy)
    run_on_ranks(2, train_in_fair_weather, weather, stormy, fair, timeout_s=timeout_s, in_group=False)
    ours, theirs = (saved_weights(path, weather.epochs - 1) for path in (stormy, fair))
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys()
    assert not different, f"weights differ: {different}"
    kinds = Counter(json.loads(line)["kind"] for line in (stormy / "out" / EVENTS_FILE).read_text().splitlines())
    assert kinds[RECOVERY] > weather.steps / 20, f"this was no storm: {kinds}"
    assert kinds[GROWTH] > weather.steps / 50, f"this storm had no end: {kinds}"
    return (
        f"seed {weather.seed} ({weather.kind}, token budget {weather.budget}): {weather.steps} steps, "
        f"{kinds[RECOVERY]} recoveries, grown back {kinds[GROWTH]} times, resumed once; every sample exactly once an "
        f"epoch, weights bitwise equal ({time.monotonic() - began:.0f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(soak(Weather(seed, options.epochs), Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    from tests.recipes import soak as this  # by its name, under which the config finds `numbered`

    sys.exit(this.main())
