"""Failed runs, and runs that trained nothing, end with one message and a status other than 0."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.captured_logs import captured_log
from tests.forked_commands import tune_run_forked
from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log
from tests.recipes.running import Finished, assert_only_torchruns_report_follows, demo_config, run_ours
from torchtune_adaptive.demo.dataset import DemoDataset, demo_sample
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import AdaptiveError

HERE = "tests.recipes.endings.test_endings"
BAD = 13
"""A sample of rank 1 if two ranks share the samples in order."""
UNREADABLE = rf"sample {BAD} of the dataset cannot be read on rank 1 \(KeyError: 'no such column'\)"
SMALL = ("dataset.samples=32", "batch_size=2", "gradient_accumulation_steps=2", "shuffle=False")
EVERY_STEP = "save_every_n_steps=1"
CHEAP = (*SMALL, "use_maximum_batch_size=False", "adaptive=null", "epochs=1")


class Flawed(DemoDataset):
    """The demo's dataset with one sample that cannot be read."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == BAD:
            raise KeyError("no such column")
        return super().__getitem__(index)


def flawed(tokenizer: DemoTokenizer, *, samples: int, packed: bool) -> Flawed:
    """Component for the `dataset` section of a config."""
    return Flawed(samples, partial(demo_sample, tokenizer, 0))


def how_it_ends(folder: Path, *overrides: str) -> tuple[str, str, list[str]]:
    """Collective: run; return the error of this rank and its log lines about losses and updates."""
    kind = message = ""
    with captured_log("torchtune_adaptive") as captured:
        try:
            run_ours("full", demo_config("full", folder, *SMALL, *overrides))
        except AdaptiveError as error:
            kind, message = type(error).__name__, str(error)
    return kind, message, [line for line in captured if "not finite" in line or " skipped)" in line]


def test_one_bad_step_is_skipped_by_default_and_weights_stay_finite(tmp_path: Path) -> None:
    burst = ("use_maximum_batch_size=False", "adaptive=null", f"loss._component_={HERE}.Burst", "clip_grad_norm=null")
    ends = run_on_ranks(2, how_it_ends, tmp_path / "run", *burst, EVERY_STEP, timeout_s=100, in_group=False)
    assert [kind for kind, _, _ in ends] == ["", ""]
    [[warned, ended], nothing] = [printed for _, _, printed in ends]
    assert (warned, nothing) == ("step 2: the gradient norm is not finite; the weights are not updated", [])
    assert re.match(r"trained: loss .* -> .* \(1 update skipped\), checkpoints in ", ended)
    assert [step["skipped_updates"] for step in read_log(tmp_path / "run" / "log.jsonl")][:3] == [0, 1, 1]
    files = (tmp_path / "run" / "out" / f"step_{step}" / "model-00001-of-00001.bin" for step in (1, 2, 3))
    first, second, third = (torch.load(file, weights_only=True) for file in files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(weight.isfinite().all() for weight in third.values())
    assert any(not torch.equal(second[name], third[name]) for name in first)


class Burst(CEWithChunkedOutputLoss):
    """A loss that is nan in the second step of a run."""

    calls = 0

    def forward(self, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = super().forward(logits, labels)
        return loss * torch.nan if self.calls == 4 else loss  # two microbatches per step


class Greedy(torch.optim.AdamW):
    """An optimizer that needs 32 MiB for each update."""

    def step(self, closure: Any = None) -> Any:
        torch.empty(32 * 2**20, dtype=torch.uint8)
        return super().step(closure)


def tune_on_two(tmp_path: Path, *overrides: str) -> Finished:
    config = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full")
    os.symlink(Path(__file__).parents[2], tmp_path / "tests")
    return tune_run_forked(*config, *CHEAP, *overrides, ranks=2, cwd=tmp_path, timeout_s=120)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            (f"dataset._component_={HERE}.flawed",),
            rf"error \(rank 1\): {UNREADABLE}",
            id="sample-that-raises",
        ),
        pytest.param(
            ("adaptive.memory_limit=[256MiB,16MiB]", f"optimizer._component_={HERE}.Greedy"),
            r"error \(rank 1\): out of memory in the optimizer step on rank 1: the weights may be partly updated",
            id="oom-in-the-update",
        ),
    ],
)
def test_error_on_rank_1_ends_both_ranks_with_its_message(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    ended = tune_on_two(tmp_path, *overrides)
    assert ended.status != 0
    assert len(re.findall(f"^{message}", ended.output, re.MULTILINE)) == 1, ended.output
    (line,) = (line for line in ended.output.splitlines() if line.startswith("error"))
    assert_only_torchruns_report_follows(line, ended.output)
