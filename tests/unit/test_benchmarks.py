"""The benchmarks in small: they run, and what they say follows from what they measured."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dealing, packing, results, scaling, stages
from benchmarks.clock import Clock, Moment
from benchmarks.overhead import CASES, time_of_a_step
from benchmarks.packing import DISTRIBUTIONS, LONGEST, SHORTEST, random_tokens
from benchmarks.recovery import POINTS, Cost, Fault, lost
from tests.recipes.running import demo_config
from tests.searching import Shape, Trained
from torchtune_adaptive.tune.samples import PAIR


def test_a_ratio_is_the_median_over_pairs_and_not_of_medians() -> None:
    pairs = [(1.0, 2.0), (10.0, 10.0), (100.0, 50.0)]
    assert results.compared(pairs) == {"ratio": 1.0, "lowest": 0.5, "highest": 2.0, "pairs": 3}


def test_a_result_is_saved_with_machine_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    written = results.save("example", [{"figure": 1.5}], "a note")
    content = json.loads(written.read_text(encoding="utf-8"))
    assert content["rows"] == [{"figure": 1.5}]
    assert content["note"] == "a note"
    assert content["machine"]["torch"] == version("torch")
    assert content["machine"]["processor"]


def test_a_table_has_a_line_for_each_row_and_leaves_out_what_is_none() -> None:
    lines = results.table([{"name": "a", "value": 1.23456}, {"name": "b", "value": None}]).splitlines()
    assert lines == ["name  value", "a     1.235", "b"]


def test_token_budgets_are_measured_in_one_process_where_nobody_waits_and_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(lengths: packing.Lengths, ranks: int, pairs: int) -> dict[str, Any]:
        return {"lengths": lengths.name, "ranks": ranks, "ratio": ranks + 0.5, "pairs": pairs}

    monkeypatch.setattr(packing, "measure", measured)
    result = packing.run(pairs=3)
    assert [(row["lengths"], row["ranks"]) for row in result.rows] == [
        (lengths, ranks) for lengths in DISTRIBUTIONS for ranks in (1, 2)
    ]
    shown = {line["figure"]: line for line in result.shown or ()}
    assert shown["ratio"] == {
        "figure": "ratio",
        **{
            f"{lengths}, {who}": ratio
            for lengths in DISTRIBUTIONS
            for who, ratio in (("1 rank", 1.5), ("2 ranks", 2.5))
        },
    }
    assert "pairs" in shown
    assert shown.keys().isdisjoint({"lengths", "ranks"}), "they are in the columns' names"


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_curve_is_not_hidden_by_what_does_not_grow(exponent: float) -> None:
    sizes = [4**power for power in range(1, 9)]
    curve = scaling.Curve("example", "things", {size: 1.0 + size**exponent for size in sizes})
    assert curve.exponent == pytest.approx(exponent, abs=0.02)


def test_the_ledger_is_measured_on_modules_that_communicate() -> None:
    with scaling.two_ranks_of_which_one_exists():
        costs = scaling.time_ledger(modules=3, rounds=1)
    assert all(milliseconds > 0 for milliseconds in costs.values())


def test_planning_and_reading_reports_are_measured_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SAMPLES", [4, 8])
    monkeypatch.setattr(scaling, "SHORTEST_ROUND_S", 0.0)
    assert [list(curve.ms) for curve in scaling.planning(rounds=1)] == [[4, 8]] * len(scaling.LIMITS)
    assert scaling.milliseconds(lambda: scaling.conclude(64), rounds=1) > 0


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_are_within_what_a_pack_can_hold(name: str) -> None:
    draw = random.Random(1)
    lengths = [DISTRIBUTIONS[name].draw_length(draw) for _ in range(2000)]
    assert SHORTEST <= min(lengths) <= max(lengths) <= LONGEST
    assert lengths.count(LONGEST) < 0.6 * len(lengths)


def test_packs_hold_the_same_tokens_as_the_samples() -> None:
    samples = random_tokens(None, lengths="instructions", samples=40)
    packs = random_tokens(None, lengths="instructions", samples=40, packed=True)
    targets = sum(label >= 0 for sample in samples for label in sample["labels"])
    assert sum(int((pack["labels"] >= 0).sum()) for pack in packs) == targets
    assert len(packs) < len(samples)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_ranks_that_are_dealt_their_samples_wait_less(name: str) -> None:
    figures = dealing.simulate(DISTRIBUTIONS[name], ranks=8, steps=3)
    assert 1 <= figures["dealt"] <= 1.02 < figures["stayed"]


def test_what_an_exchange_takes_and_sends_is_told_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"exchange ms": 1.5, "host ms": 0.5, "sent kB": 20.0}
    monkeypatch.setattr(dealing, "RANKS", (2, 8))
    monkeypatch.setattr(dealing, "exchange", lambda lengths: measured)
    result = dealing.run(pairs=1)
    told = [{name: row[name] for name in measured} for row in result.rows]
    assert told == [measured, dict.fromkeys(measured)] * len(DISTRIBUTIONS)
    assert all(name in str(result) for name in measured)


def test_an_exchange_sends_a_table_and_what_other_ranks_run_and_nothing_else() -> None:
    """Of two ranks, each runs about half of what it has read itself."""
    count = 8
    figures = dealing.exchange(replace(DISTRIBUTIONS["instructions"], samples_per_step=count))
    assert figures["exchange ms"] > 0 < figures["host ms"]
    samples = packing.RandomTokens(DISTRIBUTIONS["instructions"], 2 * count * dealing.STEPS, seed=0)
    read_kb = sum(len(pickle.dumps(sample)) for sample in samples) / (2 * dealing.STEPS) / 1e3
    table_kb = 2 * (count + 1) * 3 * 8 / 1e3
    assert 0.3 < (figures["sent kB"] - table_kb) / read_kb < 0.7


@pytest.mark.parametrize("shape", stages.SHAPES, ids=lambda shape: shape.name)
def test_pairs_of_a_shape_are_of_one_length_and_fill_whole_epochs(shape: stages.Shape) -> None:
    pair = stages.random_pairs(None, samples=4, tokens=shape.tokens)[3]
    assert PAIR.lengths_of(pair) == (shape.tokens, shape.tokens)
    assert sum(label != PAIR.ignored_label for label in pair["chosen_labels"]) == shape.tokens - shape.tokens // 2
    assert pair["chosen_input_ids"] != pair["rejected_input_ids"]
    cfg = demo_config(shape.kind, Path("nowhere/run"), *shape.config)
    assert cfg.dataset.samples % (stages.RANKS * cfg.batch_size) == 0


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_fault_costs_one_recovery_and_no_more(point: object) -> None:
    trained = Trained(Shape(layers=6), limit=2)
    fault = Fault(replace(point, microbatch=min(point.microbatch, 2)))  # type: ignore[type-var]
    fault.watch(trained.model)
    fault.armed = True
    assert trained.runner.run([trained.sample] * 4, step=1).recoveries == 1
    trained.model.zero_grad(set_to_none=True)
    assert trained.runner.run([trained.sample] * 4, step=2).recoveries == 0


def test_what_is_lost_is_counted_in_undisturbed_steps() -> None:
    figures = lost([Cost(2.0, 3.0, 2.0), Cost(1.0, 2.0, 1.1), Cost(1.0, 1.0, 1.2)])
    assert figures["lost steps"] == 1.5
    assert figures["lost s"] == 2.0
    assert figures["step after"] == 1.1


@pytest.mark.parametrize("recipe", ["full", "lora"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ours_is_compared_with_stock_where_both_shard_alike(recipe: str, ranks: int) -> None:
    assert any(case.stock == case.ours for case in CASES if (case.recipe, case.ranks) == (recipe, ranks))


def test_every_search_answers_within_what_brute_force_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("pytorch_lightning")
    from benchmarks import searches

    monkeypatch.setattr(searches, "MOST_ROWS", 16)
    rows = searches.measure(searches.Case("small", Shape(length=64), limit_bytes=800_000), rounds=1)
    assert [row["search"] for row in rows] == list(searches.CONTENDERS)
    assert 4 < rows[0]["fits"] < searches.MOST_ROWS
    assert all(0 < row["rows"] <= row["fits"] for row in rows)
    assert rows[0]["ratio"] == 1.0


def test_the_cost_of_a_step_is_counted_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [Moment(wall, cpu) for wall, cpu in [(10.0, 1.0), (11.0, 1.5), (19.0, 2.0), (20.0, 2.5)]]

    class Recipe:
        def train(self) -> None:
            Clock.times.extend(moments)

    monkeypatch.setattr(Clock, "times", [])
    assert time_of_a_step(Recipe()) == Moment(wall_s=1.0, cpu_s=0.5)
