"""Samples without labels or without tokens do not count, and do not cause a division by zero."""

from functools import partial
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log
from tests.recipes.running import demo_config, run_ours
from torchtune_adaptive.demo.dataset import DemoDataset, demo_sample
from torchtune_adaptive.demo.tokenizer import DemoTokenizer

MASKED = -100


class Hollow(DemoDataset):
    """The demo's dataset, with every third block of `run` samples empty or without labels."""

    def __init__(self, tokenizer: DemoTokenizer, samples: int, run: int, keeps_tokens: bool) -> None:
        super().__init__(samples, partial(demo_sample, tokenizer, 0))
        self._run, self._keeps_tokens = run, keeps_tokens

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = super().__getitem__(index)
        if index // self._run % 3:
            return sample
        tokens = sample["tokens"] if self._keeps_tokens else []
        return {"tokens": tokens, "labels": [MASKED] * len(tokens)}


def hollow(
    tokenizer: DemoTokenizer, *, samples: int, run: int, keeps_tokens: bool, packed: bool
) -> Dataset[dict[str, list[int]]]:
    """Component for the `dataset` section of a config."""
    return Hollow(tokenizer, samples, run, keeps_tokens)


COMMON = (
    "dataset._component_=tests.recipes.finetuning.test_samples_without_labels.hollow",
    "dataset.samples=48",
    "shuffle=False",
    "batch_size=2",
    "gradient_accumulation_steps=2",
)
A_STEP = 2 * 2 * 2
"""Samples of a step on two ranks."""
IN_BACKWARD = ("optimizer_in_bwd=True", "clip_grad_norm=null", "gradient_accumulation_steps=1", "batch_size=4")
RUNS: dict[str, tuple[str, ...]] = {
    "steps masked": (f"dataset.run={A_STEP}", "dataset.keeps_tokens=True"),
    "steps masked, in backward": (f"dataset.run={A_STEP}", "dataset.keeps_tokens=True", *IN_BACKWARD),
    "steps empty, by tokens": (f"dataset.run={A_STEP}", "dataset.keeps_tokens=False", "adaptive.token_budget=900"),
    "samples masked": ("dataset.run=1", "dataset.keeps_tokens=True"),
    "samples empty, by tokens": ("dataset.run=1", "dataset.keeps_tokens=False", "adaptive.token_budget=900"),
}


def run_all(folder: Path) -> None:
    for name, overrides in RUNS.items():
        run_ours("full", demo_config("full", folder / name, *COMMON, *overrides))


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of all steps, by run."""
    folder = tmp_path_factory.mktemp("hollow")
    run_on_ranks(2, run_all, folder, timeout_s=250, in_group=False)
    return {name: [step["loss"] for step in read_log(folder / name / "log.jsonl")] for name in RUNS}


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("steps")])
def test_step_without_labels_has_a_loss_of_zero(losses: dict[str, list[float]], name: str) -> None:
    hollow_steps = [loss for step, loss in enumerate(losses[name]) if step % 3 == 0]
    others = [loss for step, loss in enumerate(losses[name]) if step % 3]
    assert hollow_steps == [0.0, 0.0]
    assert len(others) == 4
    assert all(1 < loss < 10 for loss in others)


@pytest.mark.parametrize("what", ["steps", "samples"])
def test_empty_sample_counts_like_one_without_labels(losses: dict[str, list[float]], what: str) -> None:
    assert losses[f"{what} empty, by tokens"] == pytest.approx(losses[f"{what} masked"], rel=1e-5)
