"""Small versions of the benchmarks run, and their results follow from the measurements."""

import json
import pickle
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import dealing, packing, results, scaling
from benchmarks.packing import DISTRIBUTIONS, random_tokens
from benchmarks.recovery import POINTS, Cost, Fault, lost
from tests.searched_model import Shape, Trained


def test_ratio_is_the_median_over_pairs_not_a_ratio_of_medians() -> None:
    pairs = [(1.0, 2.0), (10.0, 10.0), (100.0, 50.0)]
    assert results.compared(pairs) == {"ratio": 1.0, "lowest": 0.5, "highest": 2.0, "pairs": 3}


def test_result_is_saved_with_machine_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    written = results.save("example", [{"figure": 1.5}], "a note")
    content = json.loads(written.read_text(encoding="utf-8"))
    assert content["rows"] == [{"figure": 1.5}]
    assert content["note"] == "a note"
    assert content["machine"]["torch"] == version("torch")
    assert content["machine"]["processor"]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_exponent_of_a_curve_excludes_its_constant_part(exponent: float) -> None:
    sizes = [4**power for power in range(1, 9)]
    curve = scaling.Curve("example", "things", {size: 1.0 + size**exponent for size in sizes})
    assert curve.exponent == pytest.approx(exponent, abs=0.02)


def test_ledger_is_measured_on_communicating_modules() -> None:
    with scaling.two_ranks_of_which_one_exists():
        costs = scaling.time_ledger(modules=3, rounds=1)
    assert all(milliseconds > 0 for milliseconds in costs.values())


def test_planning_and_reports_are_measured_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SAMPLES", [4, 8])
    monkeypatch.setattr(scaling, "SHORTEST_ROUND_S", 0.0)
    assert [list(curve.ms) for curve in scaling.planning(rounds=1)] == [[4, 8]] * len(scaling.LIMITS)
    assert scaling.milliseconds(lambda: scaling.conclude(64), rounds=1) > 0


def test_packs_contain_the_tokens_of_the_samples() -> None:
    samples = random_tokens(None, lengths="instructions", samples=40)
    packs = random_tokens(None, lengths="instructions", samples=40, packed=True)
    targets = sum(label >= 0 for sample in samples for label in sample["labels"])
    assert sum(int((pack["labels"] >= 0).sum()) for pack in packs) == targets
    assert len(packs) < len(samples)


def test_exchange_sends_only_a_table_and_samples_for_other_ranks() -> None:
    """With two ranks, each rank keeps about half of the samples it has read."""
    count = 8
    figures = dealing.exchange(replace(DISTRIBUTIONS["instructions"], samples_per_step=count))
    assert figures["exchange ms"] > 0 < figures["host ms"]
    samples = packing.RandomTokens(DISTRIBUTIONS["instructions"], 2 * count * dealing.STEPS, seed=0)
    read_kb = sum(len(pickle.dumps(sample)) for sample in samples) / (2 * dealing.STEPS) / 1e3
    table_kb = 2 * (count + 1) * 3 * 8 / 1e3
    assert 0.3 < (figures["sent kB"] - table_kb) / read_kb < 0.7


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_fault_costs_one_recovery(point: object) -> None:
    trained = Trained(Shape(layers=6), limit=2)
    fault = Fault(replace(point, microbatch=min(point.microbatch, 2)))  # type: ignore[type-var]
    fault.watch(trained.model)
    fault.armed = True
    assert trained.runner.run([trained.sample] * 4, step=1).recoveries == 1
    trained.model.zero_grad(set_to_none=True)
    assert trained.runner.run([trained.sample] * 4, step=2).recoveries == 0


def test_lost_time_is_counted_in_undisturbed_steps() -> None:
    figures = lost([Cost(2.0, 3.0, 2.0), Cost(1.0, 2.0, 1.1), Cost(1.0, 1.0, 1.2)])
    assert figures["lost steps"] == 1.5
    assert figures["lost s"] == 2.0
    assert figures["step after"] == 1.1


def test_every_search_result_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("pytorch_lightning")
    from benchmarks import searches

    monkeypatch.setattr(searches, "MOST_ROWS", 16)
    rows = searches.measure(searches.Case("small", Shape(length=64), limit_bytes=800_000), rounds=1)
    assert [row["search"] for row in rows] == list(searches.CONTENDERS)
    assert 4 < rows[0]["fits"] < searches.MOST_ROWS
    assert all(0 < row["rows"] <= row["fits"] for row in rows)
    assert rows[0]["ratio"] == 1.0
