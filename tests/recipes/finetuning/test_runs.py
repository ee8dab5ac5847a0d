"""Runs with a search, with recoveries, under token budgets or with batches that grow train like torchtune's recipe."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.fault_injection import FaultInjector
from tests.recipes.comparisons import (
    STOCK,
    Group,
    Run,
    Runs,
    assert_equals_its_reference,
    compared,
    expect_announcements,
    runs_in,
)
from tests.recipes.recorders import search_results
from tests.recipes.running import RELATIVE_AFTER_ADAM, SGD, demo_config, start_in_process
from torchtune_adaptive.demo.dataset import DemoDataset, demo_sample
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import AdaptiveError, OneRowDoesNotFitError, SampleTooLargeError

HERE = "tests.recipes.finetuning.test_runs"
MASKED = -100
COSINE = "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
BASE = (
    *SGD,
    *("batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=0.7", "dataset.samples=96"),
    *("epochs=2", "max_steps_per_epoch=3", COSINE, "lr_scheduler.num_warmup_steps=3"),
)
SEPARATE_HEAD = "custom_sharded_layers=[tok_embeddings,output]"
"""As in torchtune's 8B_full and 70B_full: FSDP gathers the head for every chunk of logits."""
BUDGET = ("adaptive.sequence_length=null", "adaptive.memory_limit=null")
BY_TOKENS = {
    "tokens": Run((*BUDGET, "adaptive.token_budget=600"), prepare=expect_announcements),
    "padded tokens": Run((*BUDGET, "adaptive.token_budget=600", "adaptive.padding=True", "adaptive.balance=False")),
}
RESUME = (
    "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]",
    "checkpointer.recipe_checkpoint=epoch_0/recipe_state.pt",
    "resume_from_checkpoint=True",
)
LITTLE_MIB = 64
"""Memory for about 8 rows of 256 tokens on rank 1; rank 0 has plenty."""
LIMIT = f"adaptive.memory_limit=[120MiB,{LITTLE_MIB}MiB]"
SEARCHED = (LIMIT, "use_maximum_batch_size=True", "adaptive.sequence_length=256")
PACKED = (*SGD, "dataset.packed=True", "tokenizer.max_seq_len=256", "clip_grad_norm=inf", "epochs=2")
GROWING = (
    *("batch_size=1", "gradient_accumulation_steps=2", "epochs=3", "clip_grad_norm=inf"),
    *(f"batch_increase_function={HERE}.double", "adaptive.max_batch_size=4"),
    *(COSINE, "lr_scheduler.num_warmup_steps=3", "optimizer.lr=0.001"),
)
A_STEP = 2 * 2 * 2
"""Samples of a step of a hollow run."""
HOLLOW = (f"dataset._component_={HERE}.hollow", "dataset.samples=48", "shuffle=False", "batch_size=2")
IN_BACKWARD = ("optimizer_in_bwd=True", "clip_grad_norm=null", "gradient_accumulation_steps=1", "batch_size=4")
EMPTY = ("dataset.keeps_tokens=False", "adaptive.token_budget=900")
TEACHER = (
    "teacher_model._component_=torchtune_adaptive.demo.model.demo_model",
    "teacher_model.num_layers=2",
    "teacher_checkpointer._component_=torchtune_adaptive.demo.weights.demo_checkpointer",
    "teacher_checkpointer.checkpoint_dir=FOLDER/../teacher",
    *("teacher_checkpointer.seed=1", "teacher_checkpointer.sizes.num_layers=2"),
)


def fail_in_the_first_step(recipe: Any) -> None:
    FaultInjector(recipe.runner).fail_at(rank=1, step=1, operation=150).__enter__()


GROUPS = {
    "full": Group(
        "full",
        2,
        BASE,
        {
            "plain": Run(),
            "checkpointed": Run(("enable_activation_checkpointing=True",)),
            "not resharded": Run(("fsdp_reshard_after_forward=False", "custom_sharded_layers=[tok_embeddings]")),
            "resumed by stock": Run(RESUME, first=(), by_stock=True),
            **BY_TOKENS,
            "measured tokens": Run((*BUDGET, "adaptive.token_budget=auto", "adaptive.memory_limit=[120MiB,48MiB]")),
            "recovered tokens": Run((*BUDGET, "adaptive.token_budget=4000", "adaptive.memory_limit=[120MiB,20MiB]")),
        },
        stop_at=4,
    ),
    "lora": Group("lora", 3, BASE, {"checkpointed": Run(("enable_activation_checkpointing=True",)), **BY_TOKENS}),
    "packed": Group(
        "full",
        2,
        (*PACKED, "batch_size=4", "gradient_accumulation_steps=1", "dataset.samples=96"),
        {
            "plain": Run(),
            "tokens": Run((*BUDGET, "adaptive.token_budget=1100", "batch_size=2", "gradient_accumulation_steps=2")),
        },
    ),
    "adam": Group(
        "full",
        2,
        ("batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=inf"),
        {
            "searched": Run(SEARCHED),
            "head by itself": Run((*SEARCHED, SEPARATE_HEAD)),
            # rows of 34 tokens make 7 of 8 chunks
            "few chunks": Run(("batch_size=1", "gradient_accumulation_steps=8", SEPARATE_HEAD)),
        },
        figures=("loss", "grad_norm"),
        rel=RELATIVE_AFTER_ADAM,
        compares_weights=False,
    ),
    "search": Group(
        "full",
        2,
        (LIMIT, "clip_grad_norm=inf"),
        {
            "searched": Run(("batch_size=2", "gradient_accumulation_steps=4", *SEARCHED), like="written"),
            "written": Run(("batch_size=8", "gradient_accumulation_steps=1", "adaptive.sequence_length=256"), like=""),
        },
        rel=0.0,
    ),
    "custom recipe": Group(
        "distillation",
        2,
        (*TEACHER, "save_every_n_steps=2", "resume_from_checkpoint=auto", "epochs=2"),
        {"plain": Run(like=""), "resumed": Run(first=(), like="plain", prepare=fail_in_the_first_step)},
        figures=("step", "loss"),
        rel=RELATIVE_AFTER_ADAM,
        compares_weights=False,
        stop_at=7,
        config=partial(demo_config, "full"),
    ),
    "growing": Group("full", 2, GROWING, {"doubled": Run(like="")}),
    "hollow steps": Group(
        "full",
        2,
        (*HOLLOW, f"dataset.run={A_STEP}", "dataset.every=3", "dataset.keeps_tokens=True"),
        {"masked": Run(like=""), "in backward": Run(IN_BACKWARD, like=""), "empty": Run(EMPTY, like="masked")},
        figures=("loss",),
        compares_weights=False,
    ),
    "hollow rank": Group(
        "full",
        2,
        (*HOLLOW, "dataset.run=1", "dataset.every=2", "dataset.keeps_tokens=True"),
        {"masked": Run(like=""), "empty": Run(EMPTY, like="masked")},
        figures=("loss",),
        compares_weights=False,
    ),
}
runs = runs_in(GROUPS)


def double(epoch: int, current_batch_size: int) -> int:
    """Called on rank 0, whose result counts: a function may be random or read a clock."""
    return current_batch_size * (1 + dist.get_rank()) if epoch else 0


class Hollow(DemoDataset):
    """The demo's dataset, with one of `every` blocks of `run` samples empty or without labels."""

    def __init__(self, tokenizer: DemoTokenizer, samples: int, run: int, every: int, keeps_tokens: bool) -> None:
        super().__init__(samples, partial(demo_sample, tokenizer, 0))
        self._run, self._every, self._keeps_tokens = run, every, keeps_tokens

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = super().__getitem__(index)
        if index // self._run % self._every == 0:
            tokens = sample["tokens"] if self._keeps_tokens else []
            return {"tokens": tokens, "labels": [MASKED] * len(tokens)}
        return sample


def hollow(tokenizer: DemoTokenizer, *, samples: int, run: int, every: int, keeps_tokens: bool, packed: bool) -> Hollow:
    """Component for the `dataset` section of a config."""
    return Hollow(tokenizer, samples, run, every, keeps_tokens)


@pytest.mark.smoke(
    *("full, plain", "lora, checkpointed", "adam, searched", "search, searched", "full, measured tokens"),
)
@pytest.mark.parametrize(("group", "name"), compared(GROUPS))
def test_figures_and_weights_are_those_of_the_reference(runs: Runs, group: str, name: str) -> None:
    of = GROUPS[group]
    assert_equals_its_reference(of, name, runs(group, name), runs(group, of.runs[name].like))


@pytest.mark.smoke
def test_search_fits_the_tightest_rank_and_the_record_has_search_and_recoveries(runs: Runs) -> None:
    run = runs("adam", "searched")
    lines = run.lines()
    assert sum("<- chosen" in line for line in lines) == 1
    assert run.lines(rank=1) == [], "only the first rank speaks"
    [search] = run.events("search")
    assert search["after"] == search["result"]["rows"] == 8
    assert search["budget_bytes"] == LITTLE_MIB * 2**20
    recoveries = run.events("recovery")
    assert [event["reason"] for event in recoveries] == [line for line in lines if "out of memory" in line]
    assert all(event["ranks"] == [1] and event["after"] < event["before"] for event in recoveries)
    last = run.log[-1]
    assert last["oom_recoveries"] == len(recoveries) > 0
    assert last["microbatch_rows"] < 8
    (epoch, *_) = run.events("epoch")
    assert (epoch["step"], epoch["after"], epoch["unit"]) == (0, 8, "rows")
    assert [(step["step"], step["loss"]) for step in run.steps] == [(step["step"], step["loss"]) for step in run.log]
    for step in run.steps:
        assert step["budget_bytes"] in (120 * 2**20, LITTLE_MIB * 2**20)
        # the memory of an operation is known only after it has run
        assert 0 < step["peak_bytes"] < 1.1 * step["budget_bytes"]


def test_ranks_gather_a_separate_head_equally_often_although_memory_runs_out(runs: Runs) -> None:
    assert runs("adam", "head by itself").log[-1]["oom_recoveries"] > 0
    assert runs("adam", STOCK).lines() == []


@pytest.mark.smoke
def test_growing_batch_has_the_planned_steps_and_microbatches_and_the_schedule_spans_them(runs: Runs) -> None:
    # 64 samples on 2 ranks: 32 per rank; 1, 2, then 4 rows, two microbatches per step
    run, warm_up, total, growth = runs("growing", "doubled"), 3, 16 + 8 + 4, [1] * 16 + [2] * 8 + [4] * 4
    assert [(step["step"], step["microbatch_rows"]) for step in run.log] == [*enumerate(growth, start=1)]
    for step in run.log[:-1]:
        done = int(step["step"])  # the rate is logged after the schedule has advanced
        progress = (done - warm_up) / (total - warm_up)
        cosine = done / warm_up if done < warm_up else 0.5 * (1 + math.cos(math.pi * progress))
        assert step["lr"] == pytest.approx(1e-3 * cosine, rel=1e-6, abs=1e-12)


def test_microbatches_stay_within_the_token_budget_and_dealing_balances_ranks(runs: Runs) -> None:
    for group in ("full", "lora"):
        padded, joined = runs(group, "padded tokens").log, runs(group, "tokens").log
        assert all(step["microbatch_tokens"] <= 600 for step in (*padded, *joined))
        assert all(0 < step["padding_fraction"] < 0.5 for step in padded)
        assert all(step["padding_fraction"] == 0 for step in joined)
        assert sum(step["microbatches"] for step in padded) > sum(step["microbatches"] for step in joined)
        assert all(1 <= step["rank_imbalance"] < 1.1 for step in joined)
        assert sum(step["rank_imbalance"] for step in padded) > sum(step["rank_imbalance"] for step in joined)


@pytest.mark.smoke
def test_token_budget_is_measured_at_a_few_lengths_without_running_out_of_memory(runs: Runs) -> None:
    run = runs("full", "measured tokens")
    result = search_results(run.folder / "out")[""]
    points = result["points"]
    assert run.log[-1]["oom_recoveries"] == 0
    assert 4 <= len(points) <= 8
    assert all(point["peak"]["fits"] for point in points)
    assert points[0]["length"] == max(point["length"] for point in points)
    assert result["held_out_error"] < 0.05
    assert result["budget_bytes"] == 48 * 2**20


def test_recoveries_under_a_token_budget_name_the_longest_sample(runs: Runs) -> None:
    recoveries = runs("full", "recovered tokens").events("recovery")
    assert runs("full", "recovered tokens").log[-1]["oom_recoveries"] == len(recoveries) > 0
    assert all(event["ranks"] == [1] and "longest sample" in event["reason"] for event in recoveries)


def test_packed_dataset_has_row_microbatches_without_padding(runs: Runs) -> None:
    assert {(step["microbatch_rows"], step["padding_fraction"]) for step in runs("packed", "tokens").log} == {(4, 0)}


@pytest.mark.parametrize(("group", "name"), [("hollow steps", name) for name in ("masked", "in backward", "empty")])
def test_step_without_labels_has_a_loss_of_zero_and_a_warning(runs: Runs, group: str, name: str) -> None:
    losses = [step["loss"] for step in runs(group, name).log]
    assert [step for step, loss in enumerate(losses) if loss == 0.0] == [0, 3]
    assert all(1 < loss < 10 for step, loss in enumerate(losses) if step % 3)
    assert len(losses) == 6
    assert sum("no token counts in the loss" in line for line in runs(group, name).lines()) == 2


def test_custom_recipe_learns_from_a_teacher_and_limits_survive_a_stop(runs: Runs) -> None:
    plain, resumed = (runs("custom recipe", name) for name in ("plain", "resumed"))
    losses = [step["loss"] for step in plain.log]
    assert losses == sorted(losses, reverse=True)
    assert plain.weights()
    for ours, other in zip(resumed.log, plain.log, strict=True):
        assert (ours["oom_recoveries"], other["oom_recoveries"]) == (1, 0), "a resumed run goes on counting"
        assert ours["microbatch_rows"] == other["microbatch_rows"] / 2


@pytest.mark.parametrize(
    ("growth", "most"), [((), 8), (("epochs=2", f"batch_increase_function={HERE}.double"), 16)], ids=["", "growing"]
)
def test_measurement_has_at_most_the_rows_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: tuple[str, ...], most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ample = ("adaptive.memory_limit=1GiB", "adaptive.token_budget=auto", "use_maximum_batch_size=False")
    start_in_process("full", "--config", "adaptive/demo/full", "dataset.samples=96", *ample, *growth)
    points = search_results(tmp_path / "runs/demo/full")[""]["points"]
    assert max(point["rows"] for point in points) == most


@pytest.mark.parametrize(
    ("budget", "limit", "error"), [("200", "null", SampleTooLargeError), ("auto", "13MiB", OneRowDoesNotFitError)]
)
def test_sample_that_does_not_fit_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, limit: str, error: type[AdaptiveError]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (f"adaptive.token_budget={budget}", f"adaptive.memory_limit={limit}", "adaptive.sequence_length=null")
    others = ("tokenizer.max_seq_len=null", "use_maximum_batch_size=False", "dataset.samples=48")
    with pytest.raises(error, match=r"sample \d+ of the dataset"):
        start_in_process("full", "--config", "adaptive/demo/full", *asked, *others)
