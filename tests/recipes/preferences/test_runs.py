"""Preference training (DPO), also with all adaptive features, has the figures and weights of torchtune's recipes."""

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.comparisons import (
    Group,
    Run,
    Runs,
    assert_equals_its_reference,
    compared,
    expect_announcements,
    runs_in,
)
from tests.recipes.recorders import read_log, search_results
from tests.recipes.running import SGD, demo_config, run_ours
from torchtune_adaptive.objectives.preference import POLICY, REFERENCE

BASE = (
    *SGD,
    *("optimizer.lr=0.05", "optimizer.weight_decay=0.0", "clip_grad_norm=null", "epochs=2"),
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    *("lr_scheduler.num_warmup_steps=2", "tokenizer.max_seq_len=128"),
)
ONE_MICROBATCH = ("batch_size=16", "gradient_accumulation_steps=1")
MEASURED = "adaptive.memory_limit=40MiB"
FIGURES = (
    *("step", "loss", "lr", "rewards/margins"),
    *(f"{what}/{answer}" for what in ("rewards", "log_probs") for answer in ("chosen", "rejected")),
)
TOLERANCE = {"figures": FIGURES, "rel": 5e-5, "abs": 2e-5}
"""A reward is beta times a difference of sums of log-probabilities: rounding errors of fp32 scale with the sums. In the
first step, all rewards are rounding errors, so `accuracies` is compared only if the microbatches are equal."""
RSO = ("loss._component_=torchtune.rlhf.loss.RSOLoss", "~loss.beta", "~loss.label_smoothing")
GROUPS = {
    "full": Group(
        "full_dpo",
        2,
        (*BASE, *ONE_MICROBATCH),
        {
            "plain": Run(),
            "searched": Run((MEASURED, "use_maximum_batch_size=True")),
            "starved": Run(("adaptive.memory_limit=17MiB", "adaptive.regrow_after=0")),
            "tokens": Run((MEASURED, "adaptive.token_budget=auto"), prepare=expect_announcements),
            "padded tokens": Run(("adaptive.token_budget=700", "adaptive.padding=True", "adaptive.balance=False")),
            "compiled": Run(("compile=True", "enable_activation_checkpointing=True")),
            "one rank": Run(("batch_size=32",), ranks=1),
        },
        **TOLERANCE,
    ),
    "RSO": Group(
        "full_dpo",
        2,
        (*BASE, *RSO, "enable_activation_checkpointing=True", "fsdp_reshard_after_forward=False"),
        {"plain": Run()},
        **{**TOLERANCE, "figures": (*FIGURES, "rewards/accuracies")},
    ),
    "lora": Group(
        "lora_dpo",
        2,
        (*BASE, "batch_size=2", "gradient_accumulation_steps=4"),
        {"plain": Run(), "compiled": Run(("compile=True", "adaptive.token_budget=500"))},
        stock_adds_ranks=True,
        **TOLERANCE,
    ),
}
runs = runs_in(GROUPS)


@pytest.mark.smoke("full, plain")
@pytest.mark.parametrize(("group", "name"), compared(GROUPS))
def test_figures_and_weights_are_those_of_the_reference(runs: Runs, group: str, name: str) -> None:
    of, ours = GROUPS[group], runs(group, name)
    assert_equals_its_reference(of, name, ours, runs(group, of.runs[name].like))
    assert ours.log[-1]["rewards/margins"] != ours.log[0]["rewards/margins"]


def test_each_stage_is_searched_separately_and_named_in_the_record(runs: Runs) -> None:
    run = runs("full", "searched")
    found = {event["stage"]: event["after"] for event in run.events("search")}
    assert found.keys() == {POLICY, REFERENCE}
    assert found[REFERENCE] > found[POLICY] >= 1
    for step in run.log:
        assert (step["microbatch_rows"], step["reference_microbatch_rows"]) == (found[POLICY], found[REFERENCE])
        assert step["oom_recoveries"] == 0
    assert {event["stage"]: event["after"] for event in run.events("epoch")} == found
    results = search_results(run.folder / "out")
    phases = {stage: list(result["probes"][-1]["peak"]["phase_bytes"]) for stage, result in results.items()}
    assert phases[REFERENCE] == ["layers forward", "loss"]
    assert {"layers forward", "layers backward", "update"} < set(phases[POLICY])


def test_both_stages_recover_and_are_named_in_the_record(runs: Runs) -> None:
    run = runs("full", "starved")
    recoveries = run.events("recovery")
    assert {event["stage"] for event in recoveries} == {POLICY, REFERENCE}
    assert run.log[-1]["oom_recoveries"] == len(recoveries)
    state = torch.load(run.folder / "out" / "epoch_1" / "recipe_state.pt", weights_only=True)
    saved = json.loads(state["adaptive"])["limit"]
    of_stages = [each["recoveries"] for each in (saved[POLICY], saved[REFERENCE])]
    assert min(of_stages) > 0
    assert sum(of_stages) == len(recoveries)


def test_token_budget_takes_pairs_with_and_without_padding(runs: Runs) -> None:
    assert {event["stage"] for event in runs("full", "tokens").events("search")} == {POLICY, REFERENCE}
    joined, plain, padded = (runs("full", name).log for name in ("tokens", "plain", "padded tokens"))
    assert all(step["padding_fraction"] == 0 for step in joined)
    assert all(step["rank_imbalance"] < 1.1 for step in joined)
    assert 0 < sum(step["padding_fraction"] for step in padded) < sum(step["padding_fraction"] for step in plain)
    assert all(step["microbatch_tokens"] <= 700 for step in padded)
    assert all(step["microbatches"] > 1 for step in padded)


# so that a shard of each projection is a whole number of blocks of 64 weights and of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4", "num_layers=1")
QUANTIZED = (
    *(f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES),
    *("dtype=bf16", "model.quantize_base=True", "model.apply_lora_to_output=False"),
    *("batch_size=1", "dataset.samples=12", "tokenizer.max_seq_len=96"),  # bf16 is slow on a CPU
)
TIGHT = (
    *("use_maximum_batch_size=True", "adaptive.round_to=none", "adaptive.sequence_length=128"),
    *("adaptive.memory_limit=36MiB", "dataset._component_=benchmarks.stages.random_pairs", "dataset.tokens=128"),
    *("dataset.samples=192", "batch_size=64", "gradient_accumulation_steps=1"),
)


def train(kind: str, folder: Path, *overrides: str) -> None:
    run_ours(kind, demo_config(kind, folder, *overrides))


def test_quantized_weights_serve_as_reference_and_policy(tmp_path: Path) -> None:
    adapter = "save_adapter_weights_only=True"
    run_on_ranks(2, train, "lora_dpo", tmp_path / "run", *SGD, *QUANTIZED, adapter, timeout_s=90, in_group=False)
    assert [path.name for path in (tmp_path / "run").rglob("*model*.*")] == ["adapter_model.pt"]
    losses = [step["loss"] for step in read_log(tmp_path / "run" / "log.jsonl")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "before the first update both are the same model"
    assert losses[-1] != losses[0]


@pytest.mark.smoke
def test_reference_fits_with_optimizer_state_that_the_search_did_not_keep(tmp_path: Path) -> None:
    """The limit of a stage holds for the whole run, not only for its first step."""
    run_on_ranks(1, train, "full_dpo", tmp_path / "run", *TIGHT, timeout_s=60, in_group=False)
    found = search_results(tmp_path / "run" / "out")
    assert found[POLICY]["rows"] < found[REFERENCE]["rows"] < 64
    assert [step["oom_recoveries"] for step in read_log(tmp_path / "run" / "log.jsonl")] == [0, 0, 0]
