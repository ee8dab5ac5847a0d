"""`python -m benchmarks.gpu_day`: which results it saves."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from torchtune_adaptive.null_cuda.build import LIBRARY

ROWS = [{"outcome": "passed"}, {"outcome": "skipped"}]


def result(status: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": status, "rows": rows}


def test_null_device_with_any_name_is_kept_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(gpu_day, "card", lambda: {"gpu": "a card"})
    monkeypatch.setattr(gpu_day, "RESULTS", tmp_path)
    monkeypatch.setenv("LD_PRELOAD", f"/somewhere/{LIBRARY}")
    monkeypatch.setattr("sys.argv", ["gpu_day", "--into", str(tmp_path / "link")])
    with pytest.raises(SystemExit, match="null device"):
        gpu_day.main()
    assert not [*tmp_path.glob("*.json")]


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        (result("done", ROWS), result("done", ROWS), True),
        (result("done", ROWS), result("stopped after 9 s", 3 * ROWS), False),
        (result("done", ROWS), result("done", []), False),
        (result("done", ROWS), result("done", ROWS[1:]), False),
        (result("failed", ROWS), result("stopped after 9 s", 2 * ROWS), True),
        (result("failed", ROWS), result("failed", ROWS[1:]), False),
        (result("failed", []), result("interrupted", []), True),
        ("{", result("done", ROWS), True),
        *((damaged, result("failed", ROWS), False) for damaged in ("{", [], {"rows": 3}, {"status": "done"}, None)),
    ],
)
def test_worse_result_does_not_replace_a_better_one(
    before: object, after: dict[str, Any], replaced: bool, tmp_path: Path
) -> None:
    path, failed = tmp_path / "gpu_part.json", tmp_path / "gpu_part.failed.json"
    path.write_text(before if isinstance(before, str) else json.dumps(before))
    stored = path.read_bytes()
    saved = path if replaced else failed
    assert gpu_day.save(path, after) == saved
    assert json.loads(saved.read_bytes()) == after
    assert replaced or path.read_bytes() == stored
    assert failed.exists() != replaced
