"""A run of several ranks ends with one message and a status other than 0 after an error on any rank or a signal."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.captured_logs import captured_log
from tests.forked_commands import STARTS_S, run_in_terminal
from tests.ranks import PATIENCE, on_ranks, patience
from tests.recipes.recorders import read_log
from tests.recipes.running import demo_config, run_ours
from torchtune_adaptive.cli.main import Condition, condition_of
from torchtune_adaptive.lifecycle.signals import ONE_SIGNAL_S

LAUNCHED = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full")
LAUNCHED_ON_PAIRS = ("adaptive_full_dpo_distributed", "--config", "adaptive/demo/dpo")
PLAIN = ("use_maximum_batch_size=False", "adaptive=null", "output_dir=out", "shuffle=False")
COMPONENTS = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torchtune_adaptive.demo.dataset import demo_dataset
from torchtune_adaptive.demo.tokenizer import DemoTokenizer

def tokenizer(max_seq_len, ranks):
    dist.barrier()
    if dist.get_rank() in ranks:
        Path(f"raised_{dist.get_rank()}").write_text(str(time.time()))
        raise FileNotFoundError("this machine has no such file")
    return DemoTokenizer(max_seq_len)

class Samples:
    def __init__(self, tokenizer, bad=None, **options):
        self.samples, self.bad = demo_dataset(tokenizer, **options), bad

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if Path("hold").exists():
            Path("held").touch()
            time.sleep(60)
        return {}["no such column"] if index == self.bad else self.samples[index]

class Greedy(torch.optim.AdamW):
    def step(self, closure=None):
        torch.empty(128 * 2**20 if self.state else 0, dtype=torch.uint8)
        return super().step(closure)
"""
GREEDY = (
    *("optimizer._component_=mine.Greedy", "adaptive.memory_limit=[256MiB,64MiB]", "adaptive.sequence_length=null"),
    "save_every_n_steps=1",
)
IN_THE_UPDATE = r"out of memory in the optimizer step on rank 1: .*/step_1\)"
ERRORS = {
    "slip": (2, ("batch_szie=8",), "batch_szie"),
    "weights of another model": (2, ("model.embed_dim=64",), "checkpointer"),
    "rank 0 only": (2, ("metric_logger=nowhere.log",), "metric_logger"),
    "rank 1 only": (2, ("tokenizer=mine.tokenizer", "tokenizer.ranks=[1]"), "tokenizer"),
    "two of three": (3, ("tokenizer=mine.tokenizer", "tokenizer.ranks=[1,2]"), "tokenizer"),
    "sample of rank 1": (2, ("dataset._component_=mine.Samples", "dataset.bad=13"), r"sample 13 .* on rank 1 "),
    "update of rank 1": (2, GREEDY, IN_THE_UPDATE),
    "update of rank 1 on pairs": (2, GREEDY, IN_THE_UPDATE),
}
"""Ranks, overrides, and what the message names."""


def tune_run(ranks: int, folder: Path, *overrides: str, launched: Sequence[str] = LAUNCHED) -> Any:
    (folder / "mine.py").write_text(COMPONENTS)
    return run_in_terminal(folder, ["--nproc_per_node", str(ranks), *launched, *PLAIN, *overrides])


def assert_printed_once_and_in_torchruns_report(message: str, output: str) -> None:
    """Check that the message is printed before any traceback, and once more inside torchrun's report."""
    ours, traceback, report = output.partition("Traceback (most recent call last)")
    assert traceback, output
    assert ours.count(message) == 1, output
    assert re.search(r"ChildFailedError: *\n=+\n.* FAILED", report), output
    assert message in report.partition("Root Cause")[2], output


@pytest.mark.smoke("rank 1 only")
@pytest.mark.parametrize("case", ERRORS)
def test_first_error_ends_all_ranks_with_its_message_within_two_seconds(case: str, tmp_path: Path) -> None:
    ranks, overrides, named = ERRORS[case]
    launched = LAUNCHED_ON_PAIRS if "pairs" in case else LAUNCHED
    with tune_run(ranks, tmp_path, *overrides, launched=launched) as run:
        assert run.wait(STARTS_S) == 1
        run.when(lambda: "ChildFailedError" in run.output, 10)
    [(moment, line)] = [(moment, line) for moment, line in run.lines if line.startswith("error")]
    assert re.match(rf"error(?: \(rank [12]\))?: .*{named}", line)
    assert_printed_once_and_in_torchruns_report(line, run.output)
    assert (tmp_path / "out").exists() == (case != "slip"), "an error in the config changes no file"
    for path in tmp_path.glob("raised_*"):
        # a machine that is busy delays the rank, the launcher and this process
        assert moment - float(path.read_text()) < 2.0 * patience() / PATIENCE


def test_second_signal_through_the_launcher_ends_all_ranks_immediately(tmp_path: Path) -> None:
    slow = ("dataset.samples=100000", "dataset._component_=mine.Samples", "save_every_n_steps=2")
    with tune_run(2, tmp_path, *slow) as run:
        # wait until a step is saved and a rank reads a sample that never arrives
        run.when(lambda: "step_2 saved in" in run.output, STARTS_S)
        (tmp_path / "hold").touch()
        run.when((tmp_path / "held").exists, 60)
        os.kill(run.pid, signal.SIGTERM)
        run.when(lambda: "SIGTERM: " in run.output, 20)
        time.sleep(2 * ONE_SIGNAL_S)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(20) == 1
        run.when(lambda: "got signal" in run.output, 10)
        assert run.ranks() == []
    [end] = re.findall(r"SIGTERM, the second signal: .*", run.output)
    assert re.findall(r"checkpoint (\S+) saved in", run.output)[-1] in end
    condition, lines = condition_of(tmp_path / "out")
    assert condition is Condition.CAN_CONTINUE
    assert any(line.endswith(end) for line in lines)


class Burst(CEWithChunkedOutputLoss):
    """A loss that is nan in the second step of a run."""

    calls = 0

    def forward(self, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = super().forward(logits, labels)
        return loss * torch.nan if self.calls == 4 else loss  # two microbatches per step


@on_ranks(2, timeout_s=100, in_group=False)
def test_one_bad_step_is_skipped_by_default_and_weights_stay_finite(tmp_path: Path) -> None:
    burst = ("loss._component_=tests.recipes.endings.test_endings.Burst", "clip_grad_norm=null")
    with captured_log("torchtune_adaptive") as lines:
        run_ours("full", demo_config("full", tmp_path / "run", *burst, "save_every_n_steps=1"))
    assert sum("not finite" in line for line in lines) == (os.environ["RANK"] == "0")
    assert [step["skipped_updates"] for step in read_log(tmp_path / "run" / "log.jsonl")][:3] == [0, 1, 1]
    files = (tmp_path / "run" / "out" / f"step_{step}" / "model-00001-of-00001.bin" for step in (1, 2, 3))
    first, second, third = (torch.load(file, weights_only=True) for file in files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(weight.isfinite().all() for weight in third.values())
    assert any(not torch.equal(second[name], third[name]) for name in first)
