"""`python -m benchmarks.gpu_day`: saved results, refusals, signals."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
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
def test_only_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(monkeypatch, "--into", str(tmp_path), "--only", "meshes", "searches", "--only", "overhead", "meshes")
    assert parts_in(tmp_path) == {"meshes", "searches", "overhead"}


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "inf", "many", ""])
def test_patience_is_a_number_above_0(
    factor: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(monkeypatch, f"--patience={factor}")
    assert f"{factor!r} is not a number above 0" in capsys.readouterr().err


@pytest.mark.usefixtures("card")
def test_null_device_with_any_name_is_kept_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(gpu_day, "RESULTS", tmp_path)
    monkeypatch.setenv("LD_PRELOAD", f"/somewhere/{LIBRARY}")
    with pytest.raises(SystemExit, match="results of a null device are meaningless"):
        main(monkeypatch, "--into", str(tmp_path / "link"))
    assert not parts_in(tmp_path)


@pytest.mark.usefixtures("card")
def test_folder_that_is_a_loop_of_links_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("LD_PRELOAD", LIBRARY)
    with pytest.raises(SystemExit, match="loop cannot be written"):
        main(monkeypatch, "--into", str(tmp_path / "loop"))


@pytest.mark.usefixtures("card")
def test_nohup_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    main(monkeypatch, "--into", str(tmp_path), "--only", "meshes")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler


@pytest.mark.usefixtures("card")
def test_closed_output_does_not_end_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", refuse)
    main(monkeypatch, "--into", str(tmp_path), "--only", "meshes", "searches")
    assert parts_in(tmp_path) == {"meshes", "searches"}


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


def test_parts_run_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paths of tests are relative."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_day, "command", lambda *_: [*PYTHON, "import os; print(os.getcwd())"])
    assert gpu_day.run("part", 60)["output"] == [str(gpu_day.ROOT)]


def test_leaks_at_exit_do_not_hide_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = [
        "nanobind: leaked 2 types!",
        ' - leaked type "a"',
        " - ... skipped remainder",
        "See https://nanobind.example",
    ]
    script = f"print('an error', *{leaks}, sep=chr(10)); raise SystemExit(1)"
    monkeypatch.setattr(gpu_day, "command", lambda *_: [*PYTHON, script])
    assert gpu_day.run("part", 60)["output"] == ["an error"]


def test_part_ends_when_gpu_day_is_killed(tmp_path: Path) -> None:
    part = (
        "import os, sys, time; from benchmarks.gpu_day import end_with_gpu_day;"
        f"end_with_gpu_day(int(sys.argv[1])); open({str(tmp_path / 'part')!r}, 'w').write(f'{{os.getpid()}} ');"
        "time.sleep(300)"
    )
    day = (
        "import sys; from benchmarks import gpu_day;"
        f"gpu_day.command = lambda *arguments: [sys.executable, '-c', {part!r}, str(arguments[-1])];"
        "gpu_day.run('part', 300)"
    )
    process = subprocess.Popen([*PYTHON, day], cwd=gpu_day.ROOT)
    try:
        number = int(awaited(lambda: written(tmp_path / "part")))
    finally:
        process.kill()
        process.wait()
    try:
        assert awaited(
            lambda: not Path(f"/proc/{number}/cmdline").exists() or not written(Path(f"/proc/{number}/cmdline"))
        )
    finally:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def awaited(ready: Any) -> Any:
    deadline = time.monotonic() + 60
    while not (found := ready()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def test_results_of_other_cases_survive_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_parts

    def run(_: int, function: str, *__: object, **___: object) -> list[str]:
        if function == "fails":
            raise AssertionError("out of luck")
        return [function]

    monkeypatch.setattr(gpu_parts, "run_on_ranks", run)
    found = []
    with pytest.raises(AssertionError, match="out of luck"):
        found += gpu_parts.in_turns([("one",), ("fails",), ("two",), ("three",)])
    assert sorted(found) == [(0, "one"), (2, "two"), (3, "three")]


def test_output_of_a_stopped_script_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_parts

    monkeypatch.setattr(gpu_parts, "CASE_S", 3)
    script = "import time; print('peak [1, 2]\\npeak [3', end='', flush=True); time.sleep(60)"
    output = gpu_parts.outputs(*PYTHON, script)
    assert output == ("peak [1, 2]", "stopped after 3 s")
    (row,) = gpu_parts.steps_of("plain", output, ("", ""), [])
    assert row["allocated"] == 1
    assert row["seconds"] is None


def test_part_without_a_gpu_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests would be skipped, or pass on the CPU."""
    from benchmarks import gpu_parts

    monkeypatch.setattr("sys.argv", ["gpu_parts", "unpadded", str(tmp_path / "rows")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(gpu_parts.PARTS, "unpadded", lambda: iter(()))
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        gpu_parts.main()
