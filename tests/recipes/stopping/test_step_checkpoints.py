"""A run that ends at any point resumes with the same command and finally equals an undisturbed run."""

import json
import os
import signal
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
from torchtune_adaptive.errors import RunStopped
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE, THIS_RUN
from torchtune_adaptive.report.journal import VALIDATION
from torchtune_adaptive.tune import distributed

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
def test_stopped_run_ends_with_weights_record_and_files_of_an_undisturbed_run(folder: Path) -> None:
    whole, stopped = (folder / name / "out" / f"epoch_{EPOCHS - 1}" for name in ("whole", "stopped"))
    files = sorted(path.name for path in whole.glob("*model*"))
    assert any(file.startswith("model") for file in files) != ("adapter-only" in folder.name)
    for file in files:
        ours, theirs = (torch.load(place / file, weights_only=True) for place in (stopped, whole))
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    expected, found = (read_timeline(place.parent).steps for place in (whole, stopped))
    assert [record["step"] for record in expected] == list(range(1, len(expected) + 1))
    assert_same_figures(found, expected, ("step", "loss", "lr", "microbatch_rows", "samples"))
    assert [path.name for path in stopped.parent.glob(".*")] == [LOCK_FILE], "no unfinished files"


VALIDATED = (
    *("batch_size=2", "gradient_accumulation_steps=1", "dataset.samples=32", "tokenizer.max_seq_len=128"),
    *("resume_from_checkpoint=auto", "save_every_n_steps=3", "seed=1"),
    "run_val_every_n_steps=2",
    "dataset_val._component_=torchtune_adaptive.demo.dataset.demo_dataset",
    *("dataset_val.samples=5", "dataset_val.seed=7"),
)


def request_a_stop(recipe: Any, at: int) -> None:
    """Let rank 1 receive a signal in this step."""
    run = recipe.runner.run

    def run_signalled(samples: Any, *, step: int, **options: Any) -> Any:
        THIS_RUN.signal = signal.SIGTERM if step == at and dist.get_rank() == 1 else None
        return run(samples, step=step, **options)

    recipe.runner.run = run_signalled


def validate(folder: Path) -> None:
    """Collective: train undisturbed; and with a signal in a step to be validated, and a kill."""
    train("full", demo_config("full", folder / "whole", *VALIDATED))
    cfg = partial(demo_config, "full", folder / "stopped", *VALIDATED)
    with pytest.raises(RunStopped):
        train("full", cfg(), watch=partial(request_a_stop, at=4))
    THIS_RUN.signal = None
    distributed.leave()
    for stop in (7, None):
        train("full", cfg(), stop_before=stop)


def saved_progress(folder: Path) -> dict[str, Any]:
    state = torch.load(folder / "out" / "epoch_0" / "recipe_state.pt", weights_only=True)
    progress: dict[str, Any] = json.loads(state["adaptive"])
    return progress


def test_stopped_run_has_the_validations_of_the_undisturbed_run(tmp_path: Path) -> None:
    run_on_ranks(2, validate, tmp_path, timeout_s=120, in_group=False)
    whole, stopped = (
        [(event["step"], event["val_loss"]) for event in read_timeline(tmp_path / name / "out").events if is_val(event)]
        for name in ("whole", "stopped")
    )
    assert [step for step, _ in whole] == [2, 4, 6, 8]
    assert stopped == whole
    assert (
        saved_progress(tmp_path / "stopped")["validated_step"] == saved_progress(tmp_path / "whole")["validated_step"]
    )


def is_val(event: dict[str, Any]) -> bool:
    return event["kind"] == VALIDATION


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
