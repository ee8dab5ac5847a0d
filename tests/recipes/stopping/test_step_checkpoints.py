"""A run that ends at any point resumes with the same command and finally equals an undisturbed run."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchao.optim import AdamW8bit

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.recorders import assert_same_figures
from tests.recipes.running import demo_config, load_ours
from tests.timeline import read_timeline
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE

EPOCHS, STEPS = 2, 4
EVERY = 3
RUN = (
    f"epochs={EPOCHS}",
    "resume_from_checkpoint=auto",
    f"save_every_n_steps={EVERY}",
    "shuffle=True",
    "seed=1",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
GROWING = (
    "batch_increase_function=tests.recipes.stopping.test_step_checkpoints.two_more_in_the_second_epoch",
    "adaptive.max_batch_size=16",
    "adaptive.lr_scaling=sqrt",
    "gradient_accumulation_steps=1",
    "batch_size=6",
)
"""Five steps of 12 samples on two ranks, then four of 16."""
EIGHT_BIT = (
    "optimizer._component_=tests.recipes.stopping.test_step_checkpoints.eight_bit",
    "adaptive.memory_limit=64MiB",
)
"""Memory limits disable torchao's compiled optimizer step."""
KINDS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "full-2-ranks": ("full", 2, ("model.attn_dropout=0.1",)),
    "full-8-bit-2-ranks": ("full", 2, EIGHT_BIT),
    "full-growing": ("full", 2, ("model.attn_dropout=0.1", *GROWING)),
    "full-in-backward": ("full", 1, ("optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")),
    "lora-tokens": ("lora", 1, ("model.lora_dropout=0.1", "adaptive.token_budget=512")),
    "lora-adapter-only": ("lora", 2, ("save_adapter_weights_only=True",)),
}
"""Recipe, ranks and overrides."""
STOPS = (2, 4, 6, 7)
"""Steps before which the run ends, in turn: before the first checkpoint, right after one, in the first step of a batch
that has grown, and after a checkpoint within its epoch.
"""


def two_more_in_the_second_epoch(epoch: int, current: int) -> int:
    return 2 * (epoch == 1)


def eight_bit(parameters: Iterable[torch.nn.Parameter], lr: float, fused: bool) -> torch.optim.Optimizer:
    return AdamW8bit(parameters, lr=lr)


def train(kind: str, cfg: Any, stop_before: int | None = None, watch: Callable[[Any], None] | None = None) -> None:
    """Collective: train our recipe to its end or to step `stop_before`."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()
    if watch is not None:
        watch(recipe)
    train_until(recipe, recipe.runner, stop_before)


def run_kind(name: str, folder: Path) -> None:
    """Collective: run once undisturbed, and once with several stops."""
    kind, _, overrides = KINDS[name]
    train(kind, demo_config(kind, folder / "whole", *RUN, *overrides))
    for stop in (*STOPS, None):
        train(kind, demo_config(kind, folder / "stopped", *RUN, *overrides), stop_before=stop)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    run_on_ranks(KINDS[name][1], run_kind, name, folder, timeout_s=240, in_group=False)
    return folder


@pytest.mark.smoke("full-2-ranks", "lora-tokens")
def test_final_weights_are_bitwise_those_of_the_undisturbed_run(folder: Path) -> None:
    whole, stopped = (folder / name / "out" / f"epoch_{EPOCHS - 1}" for name in ("whole", "stopped"))
    files = sorted(path.name for path in whole.glob("*model*"))
    assert files
    for file in files:
        ours, theirs = (torch.load(place / file, weights_only=True) for place in (stopped, whole))
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_record_has_every_step_once_with_the_figures_of_the_undisturbed_run(folder: Path) -> None:
    records = {name: read_timeline(folder / name / "out").steps for name in ("whole", "stopped")}
    steps = [record["step"] for record in records["whole"]]
    assert steps == list(range(1, len(steps) + 1))
    assert [record["step"] for record in records["stopped"]] == steps
    assert_same_figures(records["stopped"], records["whole"], ("loss", "lr", "microbatch_rows", "samples"))


def test_no_unfinished_files_remain(folder: Path) -> None:
    assert [path.name for path in (folder / "stopped" / "out").glob(".*")] == [LOCK_FILE]


def noting_numbers(path: Path, recipe: Any) -> None:
    """From here on, record the samples of each step of this rank."""
    run = recipe.runner.run

    def noting(samples: Sequence[Any], *, step: int, **options: Any) -> Any:
        result = run(samples, step=step, **options)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, [sample["number"] for sample in samples]]) + "\n")
        return result

    recipe.runner.run = noting


SAMPLES = 96  # divisible by 1, 2 and 3 ranks without padding
NUMBERED = (
    "dataset._component_=tests.recipes.long.memory_pressure.numbered",
    "dataset.seed=0",
    f"dataset.samples={SAMPLES}",
    "batch_size=2",
    "gradient_accumulation_steps=1",
    "save_every_n_steps=5",
    "tokenizer.max_seq_len=256",
)


def train_numbered(folder: Path, stop_before: int | None, options: Sequence[str]) -> None:
    """Collective: train, with a file of sample numbers for each rank."""
    path = folder / f"numbers-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.jsonl"
    cfg = demo_config("full", folder, *RUN, *NUMBERED, *options)
    train("full", cfg, stop_before, partial(noting_numbers, path))


@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (3, ("adaptive.token_budget=512",))], ids=["rows", "dealt"])
def test_another_number_of_ranks_trains_the_rest_of_the_epoch_once(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_on_ranks(2, train_numbered, folder, 13, options, timeout_s=120, in_group=False)
    run_on_ranks(ranks, train_numbered, folder, None, options, timeout_s=120, in_group=False)
    before, after = numbers(folder, 2), numbers(folder, ranks)
    first = Counter(number for step, found in before if step <= 10 for number in found)
    epoch_ends = 10 + (SAMPLES - 40) // (2 * ranks)
    first.update(number for step, found in after if step <= epoch_ends for number in found)
    assert max(first.values()) == 1
    assert len(first) == 40 + (SAMPLES - 40) // (2 * ranks) * 2 * ranks
    second = Counter(number for step, found in after if step > epoch_ends for number in found)
    assert max(second.values()) == 1
    assert len(second) == SAMPLES // (2 * ranks) * 2 * ranks


def numbers(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    """Return the samples of each step, of all ranks in order."""
    files = [path.read_text(encoding="utf-8") for path in folder.glob(f"numbers-{ranks}-*.jsonl")]
    return [(step, found) for step, found in (json.loads(line) for file in files for line in file.splitlines())]


def base_weights_while_saving(folder: Path) -> list[str]:
    """Collective: return the names of frozen weights that a save has changed."""
    recipe = load_ours("lora")(demo_config("lora", folder))
    recipe.setup()
    before = {name: weight.detach().clone() for name, weight in recipe.model.named_parameters()}
    for parameter in recipe.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.constant_(parameter, 0.5)
    trained = {name for name, parameter in recipe.model.named_parameters() if parameter.requires_grad}
    recipe.run.progress = recipe.run.progress.after_epoch(recipe.loop.schedule.epochs[0])
    recipe.loop.save()
    after = dict(recipe.model.named_parameters())
    changed = [name for name in before if name not in trained and not _same(before[name], after[name])]
    dist.barrier()
    recipe.cleanup()
    return changed


def _same(one: Any, other: Any) -> bool:
    return torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other).detach())


def test_saving_a_merged_adapter_does_not_change_the_frozen_weights(tmp_path: Path) -> None:
    for changed in run_on_ranks(2, base_weights_while_saving, tmp_path / "run", timeout_s=60, in_group=False):
        assert changed == []
