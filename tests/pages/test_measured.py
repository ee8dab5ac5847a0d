"""The tables of measurements in README and docs/measured.md follow benchmarks/results/."""

import json
from pathlib import Path

import pytest

from benchmarks.results import RESULTS
from tools import measured


@pytest.mark.parametrize(
    ("page", "name"), [(measured.README, "measured at a glance"), (measured.PAGE, "measured")], ids=["README", "page"]
)
def test_page_shows_the_current_measurements(page: Path, name: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert measured.begin(name) in text
    assert measured.renewed(text) == text, "it has drifted: python -m tools.measured"


def test_readme_table_follows_the_results(tmp_path: Path) -> None:
    for stored in RESULTS.glob("*.json"):
        (tmp_path / stored.name).write_bytes(stored.read_bytes())
    content = json.loads((tmp_path / "faults.json").read_text(encoding="utf-8"))
    content["rows"][0]["hung"] = 7
    (tmp_path / "faults.json").write_text(json.dumps(content), encoding="utf-8")
    assert "0 hung" in measured.glance()
    assert "7 hung" in measured.glance(tmp_path)


def test_page_of_several_models_shows_what_separate_limits_save() -> None:
    page = " ".join((measured.README.parent / "docs" / "preference-and-rl.md").read_text(encoding="utf-8").split())
    cases = measured.rows_of("stages"), measured.rows_of("rollouts")
    dpo, ppo = (measured.span((row["ratio by CPU time"] for row in rows), 2) for rows in cases)
    assert f"a step takes {dpo} times the CPU time in DPO, and {ppo} times in PPO" in page


@pytest.mark.parametrize("name", [line.__name__ for line in measured.LINES])
def test_table_line_follows_its_results(name: str, tmp_path: Path) -> None:
    for stored in RESULTS.glob("*.json"):
        (tmp_path / stored.name).write_bytes(stored.read_bytes())
    content = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    content["rows"] = [
        {key: 10 * at * value if isinstance(value, (int, float)) else value for key, value in row.items()}
        for at, row in enumerate(content["rows"], 1)
    ]
    (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    before, after = measured.table().splitlines(), measured.table(tmp_path).splitlines()
    changed = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    assert changed == [2 + [line.__name__ for line in measured.LINES].index(name)]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": 3}', '{"rows": [{}]}', '{"rows": [3]}'])
@pytest.mark.parametrize("name", ["recovery", "gpu_recovery"])
def test_error_names_a_damaged_file(name: str, content: str, tmp_path: Path) -> None:
    for stored in RESULTS.glob("*.json"):
        (tmp_path / stored.name).write_bytes(stored.read_bytes())
    (tmp_path / f"{name}.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"/{name}.json is missing, damaged or of another version"):
        (measured.table if name == "recovery" else measured.on_a_gpu)(tmp_path)


def test_missing_result_of_a_gpu_is_marked(tmp_path: Path) -> None:
    assert measured.on_a_gpu(tmp_path).count("not measured yet") == len(measured.GPU_PARTS)
