"""Token budgets in whole runs of both recipes: beside stock, recovering, growing, resumed, packed, of long samples."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.pictures import is_drawn
from tests.ranks import RankFailed, free_ports, run_on_ranks
from tests.recipes.finetuning.test_adaptive_runs import run_and_listen
from tests.recipes.recording import read_log
from tests.recipes.running import (
    RELATIVE,
    RELATIVE_AFTER_ADAM,
    SGD,
    demo_config,
    run_ours,
    run_stock,
    saved_weights,
    start_here,
)
from tests.recipes.stops import stopped_before, to_resume
from torchtune_adaptive.demo.dataset import DemoDataset, demo_sample
from torchtune_adaptive.demo.tokenizer import DemoTokenizer

STEPS = (*SGD, "batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=0.7", "dataset.samples=96")
BUDGET = ("adaptive.sequence_length=null", "adaptive.memory_limit=null")
"""Otherwise as in the demo's config, once a key of the section is given."""
LIMIT = "adaptive.memory_limit=[120MiB,48MiB]"
"""Rank 1 has little."""
SHORT = "adaptive.memory_limit=[120MiB,20MiB]"
"""And here not enough for its share of a step at once."""
RUNS: dict[str, tuple[str, ...]] = {
    "budget": ("adaptive.token_budget=600",),
    "rows": ("adaptive.token_budget=600", "adaptive.padding=True", "adaptive.deal=False"),
    "auto": ("adaptive.token_budget=auto", LIMIT),
    "short": ("adaptive.token_budget=4000", SHORT),
}


class EveryTokenALabel(DemoDataset):
    """The first one too, which the demo's tokenizer masks."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = super().__getitem__(index)["tokens"]
        return {"tokens": tokens, "labels": list(tokens)}


def every_token_a_label(tokenizer: DemoTokenizer, *, samples: int, packed: bool) -> EveryTokenALabel:
    """Component for a config's `dataset:`."""
    return EveryTokenALabel(samples, partial(demo_sample, tokenizer, 0))


class OneLongOnRank0(DemoDataset):
    """As many tokens for both of two ranks: in a step of four samples, one of rank 0's is long, rank 1's are alike."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        place, rank = divmod(index, 2)
        length = 56 if rank else 8 if place % 4 else 200
        return {"tokens": [1] * length, "labels": [1] * length}


def one_long_on_rank_0(tokenizer: DemoTokenizer, *, samples: int, packed: bool) -> OneLongOnRank0:
    """Component for a config's `dataset:`."""
    return OneLongOnRank0(samples, partial(demo_sample, tokenizer, 0))


class Runs(NamedTuple):
    kind: str
    ranks: int
    folder: Path
    lines: list[dict[str, list[str]]]
    """Of each rank, by the name of the run."""

    def log(self, name: str) -> list[dict[str, float]]:
        return read_log(self.folder / name / "log.jsonl")


def run_all(kind: str, folder: Path, ports: list[int]) -> dict[str, list[str]]:
    lines = {}
    *ports, port_of_stock = ports
    for (name, overrides), port in zip(RUNS.items(), ports, strict=True):
        if {LIMIT, SHORT} & {*overrides} and os.environ["WORLD_SIZE"] != "2":
            continue
        os.environ["MASTER_PORT"] = str(port)
        lines[name] = run_and_listen(kind, folder / name, *STEPS, *BUDGET, *overrides)
    os.environ["MASTER_PORT"] = str(port_of_stock)
    run_stock(kind, demo_config(kind, folder / "stock", *STEPS))
    return lines


@pytest.fixture(scope="module", params=[("full", 2), ("lora", 3)], ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    kind, ranks = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{ranks}")
    ports = free_ports(len(RUNS) + 1)
    return Runs(kind, ranks, folder, run_on_ranks(ranks, run_all, kind, folder, ports, timeout_s=250, in_group=False))


@pytest.mark.parametrize("name", ["budget", "rows"])
def test_every_step_has_the_figures_of_the_stock_recipe(runs: Runs, name: str) -> None:
    stock, ours = runs.log("stock"), runs.log(name)
    assert len(ours) == len(stock) >= 4
    for step_of_stock, step_of_ours in zip(stock, ours, strict=True):
        for figure in ("step", "loss", "grad_norm", "lr"):
            assert step_of_ours[figure] == pytest.approx(step_of_stock[figure], rel=RELATIVE), figure


@pytest.mark.parametrize("name", ["budget", "rows"])
def test_the_saved_weights_are_those_of_the_stock_recipe(runs: Runs, name: str) -> None:
    stock, ours = (saved_weights(runs.folder / who) for who in ("stock", name))
    assert ours.keys() == stock.keys()
    for weight, of_stock in stock.items():
        torch.testing.assert_close(ours[weight], of_stock, rtol=RELATIVE, atol=1e-6, msg=weight)


def test_padded_rows_are_to_be_had_and_take_more_microbatches(runs: Runs) -> None:
    rows, joined = runs.log("rows"), runs.log("budget")
    assert all(0 < step["padding_fraction"] < 0.5 and step["microbatch_tokens"] <= 600 for step in rows)
    assert sum(step["microbatches"] for step in rows) > sum(step["microbatches"] for step in joined)


def test_samples_that_are_dealt_leave_no_rank_waiting(runs: Runs) -> None:
    dealt, stayed = ([step["rank_imbalance"] for step in runs.log(name)] for name in ("budget", "rows"))
    assert all(1 <= imbalance < 1.1 for imbalance in dealt)
    assert sum(stayed) > sum(dealt)


def test_no_microbatch_is_over_the_budget_and_nothing_is_padded(runs: Runs) -> None:
    for step in runs.log("budget"):
        assert step["microbatch_tokens"] <= 600
        assert step["padding_fraction"] == 0
        assert step["microbatches"] >= 1


ON_TWO_RANKS = pytest.mark.parametrize("runs", [("full", 2)], ids=str, indirect=True)
"""Where memory is measured."""


@ON_TWO_RANKS
def test_auto_measures_a_few_lengths_without_running_out_of_memory(runs: Runs) -> None:
    lines = runs.lines[0]["auto"]
    assert any(line.startswith("token budget · ") and "probes · budget 48.0 MiB a rank" in line for line in lines)
    assert any("16 samples a step, in microbatches of at most" in line for line in lines)
    assert runs.log("auto")[-1]["oom_recoveries"] == 0
    record = json.loads((runs.folder / "auto" / "out" / "batch_search.json").read_text())
    points = record["result"]["points"]
    assert 4 <= len(points) <= 8
    assert all(point["peak"]["fits"] for point in points)
    assert points[0]["length"] == max(point["length"] for point in points)
    assert record["result"]["held_out_error"] < 0.05
    assert record["result"]["budget_bytes"] == 48 * 2**20
    assert is_drawn(runs.folder / "auto" / "out" / "batch_search.png")


@pytest.mark.parametrize(
    ("growth", "most"),
    [((), 8), (("epochs=2", "batch_increase_function=tests.recipes.finetuning.test_token_budget.twice"), 16)],
)
def test_auto_probes_no_more_rows_than_a_step_has_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: tuple[str, ...], most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ample = ("adaptive.memory_limit=1GiB", "adaptive.token_budget=auto", "use_maximum_batch_size=False")
    start_here("full", "--config", "adaptive/demo/full", *STEPS, *ample, *growth)
    record = json.loads((tmp_path / "runs/demo/full/batch_search.json").read_text())
    assert max(point["rows"] for point in record["result"]["points"]) == most


def twice(epoch: int, batch_size: int) -> int:
    """A `batch_increase_function`."""
    return batch_size if epoch == 1 else 0


@ON_TWO_RANKS
def test_auto_trains_what_stock_trains(runs: Runs) -> None:
    for step_of_stock, step_of_ours in zip(runs.log("stock"), runs.log("auto"), strict=True):
        assert step_of_ours["loss"] == pytest.approx(step_of_stock["loss"], rel=RELATIVE)


@ON_TWO_RANKS
def test_a_budget_that_does_not_fit_is_recovered_from_with_the_losses_of_stock(runs: Runs) -> None:
    lines = [line for line in runs.lines[0]["short"] if "out of memory" in line]
    assert lines
    assert all("on rank 1 (longest sample" in line and "tokens, step repeated" in line for line in lines)
    assert runs.log("short")[-1]["oom_recoveries"] == len(lines)
    for step_of_stock, step_of_ours in zip(runs.log("stock"), runs.log("short"), strict=True):
        assert step_of_ours["loss"] == pytest.approx(step_of_stock["loss"], rel=RELATIVE)


EPOCHS = 4
GROWING = (
    *(f"epochs={EPOCHS}", "dataset.samples=48", "batch_size=1", "gradient_accumulation_steps=2", "clip_grad_norm=inf"),
    "batch_increase_function=tests.recipes.finetuning.test_token_budget.double_in_the_third_epoch",
)


def double_in_the_third_epoch(epoch: int, current_batch_size: int) -> int:
    """Doubles on rank 0, whose answer counts: a function may draw, or read a clock."""
    return current_batch_size * (1 + dist.get_rank()) if epoch == 2 else 0


def grow(folder: Path, ports: list[int]) -> list[str]:
    """Collective: by rows; by tokens; and by tokens, stopped after the second epoch and resumed."""
    budget = ("adaptive.token_budget=700", *BUDGET)
    os.environ["MASTER_PORT"] = str(ports[0])
    run_ours("full", demo_config("full", folder / "rows", *GROWING))
    os.environ["MASTER_PORT"] = str(ports[1])
    lines = run_and_listen("full", folder / "tokens", *GROWING, *budget)
    os.environ["MASTER_PORT"] = str(ports[2])
    with stopped_before(2):
        run_ours("full", demo_config("full", folder / "resumed", *GROWING, *budget))
    os.environ["MASTER_PORT"] = str(ports[3])
    run_ours("full", demo_config("full", folder / "resumed", *GROWING, *budget, *to_resume("full", 2)))
    return lines


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("growing")
    lines = run_on_ranks(2, grow, folder, free_ports(4), timeout_s=250, in_group=False)
    return folder, lines[0]


def test_a_growing_batch_by_tokens_trains_what_it_trains_by_rows(grown: tuple[Path, list[str]]) -> None:
    by_rows, by_tokens = (read_log(grown[0] / name / "log.jsonl") for name in ("rows", "tokens"))
    assert len(by_rows) == len(by_tokens)
    for one, other in zip(by_rows, by_tokens, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=RELATIVE_AFTER_ADAM)


def test_the_schedule_of_a_run_by_tokens_says_so(grown: tuple[Path, list[str]]) -> None:
    assert any("by tokens" in line for line in grown[1])


def test_a_resumed_run_by_tokens_is_the_run_that_was_never_stopped(grown: tuple[Path, list[str]]) -> None:
    whole, resumed = (read_log(grown[0] / name / "log.jsonl") for name in ("tokens", "resumed"))
    assert [step["step"] for step in resumed] == [step["step"] for step in whole]
    for one, other in zip(whole, resumed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=RELATIVE)
        assert other["microbatch_tokens"] == one["microbatch_tokens"]


SMALL = ("dataset.samples=48", "batch_size=2", "gradient_accumulation_steps=2", "clip_grad_norm=inf")
EVERY_TOKEN = "dataset._component_=tests.recipes.finetuning.test_token_budget.every_token_a_label"
LONG = {
    "packed": ("adaptive.token_budget=1100", "dataset.packed=True", "tokenizer.max_seq_len=256", "dataset.samples=96"),
    "packed by rows": (
        "dataset.packed=True",
        "tokenizer.max_seq_len=256",
        "dataset.samples=96",
        "batch_size=4",
        "gradient_accumulation_steps=1",
    ),
    "first labels, budget": ("adaptive.token_budget=2000", "tokenizer.max_seq_len=330", EVERY_TOKEN),
    "first labels, smaller": ("adaptive.token_budget=330", "tokenizer.max_seq_len=330", EVERY_TOKEN),
    "one long": (
        "adaptive.token_budget=2000",
        "adaptive.padding=False",
        "adaptive.deal=False",
        "dataset._component_=tests.recipes.finetuning.test_token_budget.one_long_on_rank_0",
        "shuffle=False",
    ),
}


def run_long(folder: Path, ports: list[int]) -> dict[str, list[str]]:
    lines = {}
    for (name, overrides), port in zip(LONG.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        lines[name] = run_and_listen("full", folder / name, *SMALL, *BUDGET, *overrides)
    return lines


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("long")
    lines = run_on_ranks(2, run_long, folder, free_ports(len(LONG)), timeout_s=200, in_group=False)
    return Runs("full", 2, folder, lines)


def test_a_rank_with_a_long_sample_counts_as_fuller_than_one_with_as_many_tokens(long: Runs) -> None:
    steps = long.log("one long")
    assert len(steps) == 6
    assert all(step["microbatch_tokens"] == 224 and step["padding_fraction"] == 0 for step in steps)
    assert all(1.05 < step["rank_imbalance"] < 2 for step in steps)


def test_a_packed_dataset_has_microbatches_by_rows_and_says_so_once(long: Runs) -> None:
    said = [line for line in long.lines[0]["packed"] if "the dataset is packed" in line]
    assert said == ["token budget · the dataset is packed, all rows have 256 tokens: microbatches of 4 rows"]
    by_rows, by_tokens = long.log("packed by rows"), long.log("packed")
    assert [step["loss"] for step in by_tokens] == pytest.approx(
        [step["loss"] for step in by_rows], rel=RELATIVE_AFTER_ADAM
    )
    assert len(by_tokens) >= 2
    assert all(step["padding_fraction"] == 0 for step in by_tokens)


def test_the_gradient_does_not_depend_on_the_split_even_where_first_tokens_are_labels(long: Runs) -> None:
    one, other = long.log("first labels, budget"), long.log("first labels, smaller")
    assert [s["microbatches"] for s in one] != [s["microbatches"] for s in other]
    for step, same_step in zip(one, other, strict=True):
        assert same_step["loss"] == pytest.approx(step["loss"], rel=RELATIVE_AFTER_ADAM)
        assert same_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=RELATIVE_AFTER_ADAM)


def run_too_long(folder: Path, *overrides: str) -> None:
    run_ours("full", demo_config("full", folder, *SMALL, *BUDGET, *overrides))


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("200", r"SampleTooLargeError: sample \d+ of the dataset has \d+ tokens.* raise adaptive\.token_budget"),
        ("auto", r"OneRowDoesNotFitError: one row of \d+ tokens .* \(sample \d+ of the dataset\); "),
    ],
)
def test_a_sample_that_does_not_fit_is_named_before_training_starts(tmp_path: Path, budget: str, told: str) -> None:
    limit = "adaptive.memory_limit=13MiB" if budget == "auto" else "adaptive.memory_limit=null"
    overrides = (f"adaptive.token_budget={budget}", "tokenizer.max_seq_len=null", limit)
    with pytest.raises(RankFailed, match=told):
        run_on_ranks(2, run_too_long, tmp_path / "run", *overrides, timeout_s=100, in_group=False)
