"""Searching, recovering and growing in whole runs on two ranks, as a user sees them."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.captured_logs import captured_log
from tests.ranks import run_on_ranks
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE_AFTER_ADAM, demo_config, run_ours

PLAIN = ("batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=inf")
SEARCHING = ("use_maximum_batch_size=True", "adaptive.sequence_length=256")
LIMIT_MIB = 64
"""Memory for about 8 rows of 256 tokens on rank 1; rank 0 has plenty."""
HEAD_BY_ITSELF = "custom_sharded_layers=[tok_embeddings,output]"
"""As in torchtune's 8B_full and 70B_full: FSDP gathers the head for every chunk of logits."""
GROWING = (
    "batch_size=1",
    "gradient_accumulation_steps=2",
    "epochs=3",
    "clip_grad_norm=inf",
    "batch_increase_function=tests.recipes.finetuning.test_adaptive_runs.double",
    "adaptive.max_batch_size=4",
    "adaptive.lr_scaling=sqrt",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=3",
    "optimizer.lr=0.001",
)


def double(epoch: int, current_batch_size: int) -> int:
    """Called on rank 0, whose result counts: a function may be random or read a clock."""
    return current_batch_size * (1 + dist.get_rank()) if epoch else 0


class Runs(NamedTuple):
    folder: Path
    lines: list[dict[str, list[str]]]
    """Log lines of each rank, by name of the run."""

    def log(self, name: str) -> list[dict[str, float]]:
        return read_log(self.folder / name / "log.jsonl")


def run_and_listen(kind: str, folder: Path, *overrides: str) -> list[str]:
    """Collective: run the recipe; return the lines logged on this rank."""
    with captured_log() as lines:
        run_ours(kind, demo_config(kind, folder, *overrides))
    return lines


def run_all(folder: Path) -> dict[str, list[str]]:
    limit = f"adaptive.memory_limit=[120MiB,{LIMIT_MIB}MiB]"
    runs: dict[str, tuple[str, ...]] = {
        "searched": (*PLAIN, limit, *SEARCHING),
        "written": (*PLAIN, limit, "batch_size=8", "gradient_accumulation_steps=1"),
        "head by itself": (*PLAIN, limit, *SEARCHING, HEAD_BY_ITSELF),
        "few chunks": (*PLAIN, "batch_size=1", "gradient_accumulation_steps=8", HEAD_BY_ITSELF),
        "unlimited": PLAIN,
        "growing": GROWING,
    }
    return {name: run_and_listen("full", folder / name, *overrides) for name, overrides in runs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("adaptive")
    return Runs(folder, run_on_ranks(2, run_all, folder, timeout_s=100, in_group=False))


@pytest.mark.smoke
def test_search_fits_the_tightest_rank_and_logs_its_probes(runs: Runs) -> None:
    lines = runs.lines[0]["searched"]
    assert f"batch search · linear · 256 tokens · budget {LIMIT_MIB}.0 MiB a rank" in lines
    assert sum("<- chosen" in line for line in lines) == 1
    assert not any(runs.lines[1].values()), "only the first rank speaks"
    assert any(line.startswith("8 rows × 1 microbatch × 2 ranks = 16 samples a step (as configured)") for line in lines)


@pytest.mark.smoke
def test_training_after_a_search_equals_training_with_that_batch_size(runs: Runs) -> None:
    searched, written = runs.log("searched"), runs.log("written")
    assert len(searched) == len(written) == 4
    assert_same_figures(searched, written, ("loss", "grad_norm"))


@pytest.mark.smoke
def test_run_with_recoveries_has_the_losses_of_an_unlimited_run(runs: Runs) -> None:
    limited, unlimited = runs.log("searched"), runs.log("unlimited")
    assert unlimited[-1]["oom_recoveries"] == 0
    assert_same_figures(limited, unlimited, ("loss", "grad_norm"), rel=RELATIVE_AFTER_ADAM)


def test_ranks_gather_the_head_equally_often_for_any_lengths(runs: Runs) -> None:
    # after a search, whose first step has two tokens; and with rows of 34 tokens, which make 7 of 8 chunks
    assert runs.log("head by itself")[-1]["oom_recoveries"] > 0
    for name in ("head by itself", "few chunks"):
        assert_same_figures(runs.log(name), runs.log("unlimited"), ("loss", "grad_norm"), rel=RELATIVE_AFTER_ADAM)


@pytest.mark.smoke
def test_record_of_a_run_has_its_events(runs: Runs) -> None:
    output = runs.folder / "searched" / "out"
    events = read_log(output / "adaptive_events.jsonl")
    recoveries = [event for event in events if event["kind"] == "recovery"]
    assert [event["kind"] for event in events[:2]] == ["start", "search"]
    assert events[1]["after"] == events[1]["result"]["rows"] == 8
    assert events[1]["budget_bytes"] == LIMIT_MIB * 2**20
    lines = [line for line in runs.lines[0]["searched"] if "out of memory" in line]
    assert [event["reason"] for event in recoveries] == lines
    assert runs.log("searched")[-1]["oom_recoveries"] == len(lines) > 0
    assert runs.log("searched")[-1]["microbatch_rows"] < 8
    assert all(event["ranks"] == [1] and event["after"] < event["before"] for event in recoveries)
    assert all(0 < event["lost_seconds"] < 60 for event in recoveries)
    (epoch, *_) = (event for event in events if event["kind"] == "epoch")
    assert (epoch["step"], epoch["after"], epoch["unit"]) == (0, 8, "rows")


def test_record_has_memory_and_budget_of_every_step(runs: Runs) -> None:
    steps, logged = read_log(runs.folder / "searched" / "out" / "adaptive_steps.jsonl"), runs.log("searched")
    assert [step["step"] for step in steps] == [step["step"] for step in logged]
    for step, other in zip(steps, logged, strict=True):
        assert step["loss"] == other["loss"]
        assert step["budget_bytes"] in (120 * 2**20, LIMIT_MIB * 2**20)
        # the memory of an operation is known only after it has run
        assert 0 < step["peak_bytes"] < 1.1 * step["budget_bytes"]


@pytest.mark.smoke
def test_growing_batch_takes_the_planned_steps_and_microbatches(runs: Runs) -> None:
    # 64 samples on 2 ranks: 32 per rank; 1, 2, then 4 rows, two microbatches per step
    log = runs.log("growing")
    assert [step["step"] for step in log] == list(range(1, 16 + 8 + 4 + 1))
    assert [step["microbatch_rows"] for step in log] == [1] * 16 + [2] * 8 + [4] * 4
    events = read_log(runs.folder / "growing" / "out" / "adaptive_events.jsonl")
    grown = [(event["step"], event["before"], event["after"]) for event in events if event["kind"] == "schedule"]
    assert grown == [(16, 4, 8), (24, 8, 16)]
    assert any("batch schedule · 3 epochs · 28 steps" in line for line in runs.lines[0]["growing"])


def test_growing_batch_has_the_expected_learning_rate(runs: Runs) -> None:
    warm_up, total = 3, 16 + 8 + 4
    growth = [1.0] * 16 + [2.0] * 8 + [4.0] * 4
    for step in runs.log("growing")[:-1]:
        done = int(step["step"])  # the rate is logged after the schedule has advanced
        progress = (done - warm_up) / (total - warm_up)
        cosine = done / warm_up if done < warm_up else 0.5 * (1 + math.cos(math.pi * progress))
        # the factor of an epoch applies from its first step, so the rate logged before still has the old one
        factor = math.sqrt(growth[done - 1])
        assert step["lr"] == pytest.approx(1e-3 * cosine * factor, rel=1e-6, abs=1e-12)
