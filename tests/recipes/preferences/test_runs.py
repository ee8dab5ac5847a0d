"""Preference training with all adaptive features has the losses and rewards of a run without them."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.forked_commands import tune_run_forked
from tests.ranks import run_on_ranks
from tests.recipes.recorders import assert_same_figures, events_of, read_log, search_results
from tests.recipes.running import SGD, demo_config, run_ours
from torchtune_adaptive.tune.preference import POLICY, REFERENCE

RELATIVE = 5e-5
BASE = (
    *SGD,
    "optimizer.lr=0.01",
    "batch_size=16",
    "gradient_accumulation_steps=1",
    "tokenizer.max_seq_len=128",
    "epochs=2",
    "clip_grad_norm=inf",
)
MEASURED = "adaptive.memory_limit=40MiB"
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "searched": (MEASURED, "use_maximum_batch_size=True"),
    "starved": ("adaptive.memory_limit=17MiB", "adaptive.regrow_after=0"),
    "joined": (MEASURED, "adaptive.token_budget=auto"),
    "tokens": ("adaptive.token_budget=700", "adaptive.padding=True", "adaptive.deal=False"),
}
ONE_RANK = "one rank"
FIGURES = (
    "loss",
    "grad_norm",
    *(f"{what}/{answer}" for what in ("rewards", "log_probs") for answer in ("chosen", "rejected")),
)


def run_all(folder: Path, cases: dict[str, tuple[str, ...]]) -> None:
    for case, overrides in cases.items():
        run_ours("full_dpo", demo_config("full_dpo", folder / case, *BASE, *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full_dpo")
    run_on_ranks(2, run_all, folder, CASES, timeout_s=200, in_group=False)
    run_on_ranks(1, run_all, folder, {ONE_RANK: ("batch_size=32",)}, timeout_s=60, in_group=False)
    return folder


@pytest.mark.parametrize("case", [*(case for case in CASES if case != "plain"), ONE_RANK])
def test_losses_and_rewards_are_those_of_a_plain_run(runs: Path, case: str) -> None:
    plain, ours = (read_log(runs / each / "log.jsonl") for each in ("plain", case))
    assert len(ours) == len(plain) == 4
    assert_same_figures(ours, plain, FIGURES, rel=RELATIVE, abs=1e-5)
    assert plain[-1]["rewards/margins"] > plain[0]["rewards/margins"]


def test_each_stage_is_searched_separately_and_named_in_the_record(runs: Path) -> None:
    found = {event["stage"]: event["after"] for event in events_of(runs / "searched", "search")}
    assert found.keys() == {POLICY, REFERENCE}
    assert found[REFERENCE] > found[POLICY] >= 1
    for step in read_log(runs / "searched" / "log.jsonl"):
        assert (step["microbatch_rows"], step["reference_microbatch_rows"]) == (found[POLICY], found[REFERENCE])
        assert step["oom_recoveries"] == 0
    assert {event["stage"]: event["after"] for event in events_of(runs / "searched", "epoch")} == found


def test_search_measures_the_phases_of_its_stage(runs: Path) -> None:
    found = search_results(runs / "searched" / "out")
    phases = {stage: list(result["probes"][-1]["peak"]["phase_bytes"]) for stage, result in found.items()}
    assert phases[REFERENCE] == ["layers forward", "loss"]
    assert {"layers forward", "layers backward", "update"} < set(phases[POLICY])


def test_both_stages_recover_and_are_named_in_the_record(runs: Path) -> None:
    recoveries = events_of(runs / "starved", "recovery")
    assert {event["stage"] for event in recoveries} == {POLICY, REFERENCE}
    for event in recoveries:
        assert event["reason"].startswith(f"step {event['step']}, {event['stage']}: out of memory on rank")
    assert read_log(runs / "starved" / "log.jsonl")[-1]["oom_recoveries"] == len(recoveries)
    state = torch.load(runs / "starved" / "out" / "epoch_1" / "recipe_state.pt", weights_only=True)
    saved = json.loads(state["adaptive"])["limit"]
    of_stages = [each["recoveries"] for each in (saved[POLICY], saved[REFERENCE])]
    assert min(of_stages) > 0
    assert sum(of_stages) == len(recoveries)


def test_token_budget_takes_pairs_with_and_without_padding(runs: Path) -> None:
    assert {event["stage"] for event in events_of(runs / "joined", "search")} == {POLICY, REFERENCE}
    steps = {case: read_log(runs / case / "log.jsonl") for case in ("joined", "plain", "tokens")}
    assert all(step["padding_fraction"] == 0 for step in steps["joined"])
    assert all(step["rank_imbalance"] < 1.1 for step in steps["joined"])
    wasted = {case: sum(step["padding_fraction"] for step in each) for case, each in steps.items()}
    assert 0 < wasted["tokens"] < wasted["plain"]
    assert all(step["microbatch_tokens"] <= 700 for step in steps["tokens"])
    assert all(step["microbatches"] > 1 for step in steps["tokens"])


@pytest.mark.parametrize(
    ("recipe", "config"),
    [("adaptive_full_dpo_distributed", "dpo"), ("adaptive_lora_dpo_distributed", "lora_dpo")],
)
def test_demo_runs_with_the_documented_command(recipe: str, config: str, tmp_path: Path) -> None:
    short = ("dataset.samples=64", "max_steps_per_epoch=3", "tokenizer.max_seq_len=96", "adaptive.sequence_length=96")
    ended = tune_run_forked(recipe, "--config", f"adaptive/demo/{config}", *short, ranks=2, cwd=tmp_path, timeout_s=90)
    assert ended.status == 0, ended.output
    assert "batch search · reference log-probabilities · linear" in ended.output
    assert "batch search · policy · linear" in ended.output
    assert "trained: loss 0.6931 -> " in ended.output
    [log] = (tmp_path / "runs" / "demo" / config / "logs").glob("log_*.txt")
    margins = [float(margin) for margin in re.findall(r"rewards/margins:(\S+)", log.read_text())]
    assert len(margins) == 3
    assert margins[0] == 0  # the policy still equals its reference
    assert margins[-1] > 0
