"""`python -m benchmarks.gpu_day`: saved results, refusals, signals."""

import fcntl
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from torchtune_adaptive.null_cuda.build import LIBRARY

ROWS = [{"outcome": "passed"}, {"outcome": "skipped"}]
PYTHON = [sys.executable, "-c"]


def result(status: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": status, "rows": rows}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose parts take no time; signals are restored."""
    monkeypatch.setattr(gpu_day, "card", lambda: {"gpu": "a card"})
    monkeypatch.setattr(gpu_day, "command", lambda *_: [*PYTHON, ""])
    before = {number: signal.getsignal(number) for number in gpu_day.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_day", *arguments])
    gpu_day.main()


def parts_in(folder: Path) -> set[str]:
    return {path.stem.removeprefix("gpu_") for path in folder.glob("*.json")}


@pytest.mark.usefixtures("card")
def test_second_gpu_day_in_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another gpu_day saves to"):
            main(monkeypatch, "--into", str(tmp_path))


@pytest.mark.usefixtures("card")
def test_null_device_with_any_name_is_kept_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(gpu_day, "RESULTS", tmp_path)
    monkeypatch.setenv("LD_PRELOAD", f"/somewhere/{LIBRARY}")
    with pytest.raises(SystemExit, match="results of a null device are meaningless"):
        main(monkeypatch, "--into", str(tmp_path / "link"))
    assert not parts_in(tmp_path)


@pytest.mark.usefixtures("card")
def test_result_that_is_not_saved_is_printed_and_fails_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu_meshes.json").mkdir()
    monkeypatch.setattr(gpu_day, "run", lambda *_: {**result("done", ROWS), "part": "meshes", "seconds": 1.0})
    with pytest.raises(SystemExit, match="1"):
        main(monkeypatch, "--into", str(tmp_path), "--only", "meshes")
    output = capsys.readouterr().out
    assert "meshes: done, not saved" in output
    assert json.dumps(ROWS) in output


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


def test_part_without_a_gpu_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests would be skipped, or pass on the CPU."""
    from benchmarks import gpu_parts

    monkeypatch.setattr("sys.argv", ["gpu_parts", "unpadded", str(tmp_path / "rows")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(gpu_parts.PARTS, "unpadded", lambda: iter(()))
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        gpu_parts.main()
