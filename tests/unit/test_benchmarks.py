"""Small versions of the benchmarks run, and their results follow from the measurements."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import results
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
