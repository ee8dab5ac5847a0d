"""Expectations, recorded peaks and files of cases, with results that no rehearsal has made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_rehearsal.ci.cases import read_cases
from gpu_rehearsal.ci.expectations import (
    Expectations,
    peak_of,
    read_peaks,
    report,
    update_peaks,
)
from gpu_rehearsal.ci.github import annotate, write_summary
from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.gpus import GPUS
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.sweep import SweepRow

GIB = 2**30


def result(allocated: float, reserved: float, **about: Any) -> RehearsalResult:
    """Return the result of a script that fits in 78 GiB."""
    step = {"step": 1, "allocated_bytes": int(allocated * GIB), "reserved_bytes": int(reserved * GIB), "flushes": 0}
    held = {"held_bytes": {"parameters": 2 * GIB, "optimizer": 4 * GIB}}
    return RehearsalResult(78 * GIB, GIB, 0, 1, 0, steps=[step], held=held, **about)


def out_of_memory() -> RehearsalResult:
    error = {"step": 2, "allocated_bytes": 60 * GIB, "reserved_bytes": 61 * GIB, "asked_bytes": GIB, "in_search": False,
             "has_optimizer": True, "allowed_bytes": 78 * GIB, "free_bytes": 0, "held_bytes": {"optimizer": 60 * GIB},
             "file": "train.py", "line": 1, "source": "step()", "operation": "step()"}  # fmt: skip
    return replace(
        result(50, 51), status=1, errors=[error], end={"by_memory": True, "allocated_bytes": 0, "reserved_bytes": 0}
    )


RECORDED = peak_of(result(10, 12))


@pytest.mark.parametrize(
    ("expected", "found", "failure"),
    [
        ({}, result(10, 12), None),
        ({}, out_of_memory(), "does not fit: out of memory in step 2, 60.0 of 78.0 GiB allocated, 1.00 GiB more"),
        ({}, replace(result(10, 12), status=3), "no answer: the script failed"),
        ({"fits": False}, out_of_memory(), None),
        ({"fits": False}, result(10, 12), "fits, but should not"),
        ({"fits": False}, replace(result(10, 12), status=3), "no answer"),
        ({"reserved_below": "13GiB", "allocated_below": 11 * GIB}, result(10, 12), None),
        ({"reserved_below": "12GiB"}, result(10, 12), "12.00 GiB reserved, 0 B above reserved_below (12.00 GiB)"),
        ({"allocated_below": "7.5GiB"}, result(10, 12), "10.00 GiB allocated, 2.50 GiB above allocated_below"),
        ({"at_least": 4}, result(10, 12, largest=4), None),
        ({"at_least": 4}, result(10, 12, searches=[{"stage": "", "result": {"rows": 3}}]), "3 fit; at_least is 4"),
        ({"at_least": 4}, result(10, 12), "nothing was searched; at_least is 4"),
        ({"growth_percent": 2}, result(10.2, 12.1), None),
        ({"growth_percent": 2}, result(8, 9), None),
        ({"growth_percent": 2}, result(10.5, 12), "512.00 MiB (5.0 %) more allocated than the recorded 10.00 GiB"),
        ({"growth_percent": 2}, result(10, 15), "3.00 GiB (25.0 %) more reserved than the recorded 12.00 GiB"),
    ],
)
def test_failure_states_what_was_expected_and_by_how_much_it_is_missed(
    expected: dict[str, Any], found: RehearsalResult, failure: str | None
) -> None:
    failures = Expectations(**expected).failures(found, RECORDED)
    ran_out = expected == {} and found.fits is False
    assert len(failures) == (failure is not None) + ran_out
    assert failure is None or failures[0].startswith(failure)
    if ran_out:
        assert "recorded peak, with which it fitted: 10.00 GiB allocated" in report(failures, found, RECORDED)
    if "growth_percent" in expected:
        (without_record,) = Expectations(**expected).failures(found, None)
        assert "--update-peaks" in without_record


def test_line_that_needs_more_than_the_recorded_peak_is_found_with_less_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, given = Expectations(growth_percent=2), dict[str, Any]()
    grown = expected.find_growth(result(10.5, 12), RECORDED, lambda **other: given.update(other) or out_of_memory())
    assert given["memory"] - given["memory_overhead"] == int(10.25 * GIB)
    failures = expected.failures(grown, RECORDED)
    assert failures[1] == "with 78.00 GiB, step 2 runs out of memory at train.py:1: step()"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(Path.cwd().parent))
    annotate("4090, 8%", failures, grown, Path("fits.toml"))
    place = f"file={Path.cwd().name}/train.py,line=1"
    assert capsys.readouterr().err.startswith(
        f"::error {place},title=4090%2C 8%25::512.00 MiB (5.0 %25) more allocated"
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    write_summary([SweepRow(GPUS["4090"], grown, "small", failures, "the report", GIB // 2)])
    table = (tmp_path / "summary").read_text()
    assert "| small | 4090 | 1 | **512.00 MiB (5.0 %) more allocated" in table
    assert "| 12.0 | +0.50 |  |\n" in table
    assert expected.find_growth(result(10, 12), RECORDED, lambda **_: pytest.fail("not grown")) == result(10, 12)


@pytest.mark.parametrize(
    "wrong",
    [{"fits": 1}, {"at_least": 0}, {"at_least": True}, {"reserved_below": "70"}, {"allocated_below": -1},
     {"growth_percent": -2}, {"growth_percent": "2"}, {"growth_percent": True}, {"growth_percent": float("nan")},
     {"growth_percent": 2, "fits": False}],
    ids=str,
)  # fmt: skip
def test_invalid_expectation_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Expectations(**wrong)


@pytest.mark.parametrize(
    "entry",
    [{}, 7, {**RECORDED, "reserved_bytes": float("nan")}, {**RECORDED, "allocated_bytes": "10 GiB"},
     {**RECORDED, "by_kind": None}, {**RECORDED, "by_kind": {"parameters": "2 GiB"}}],
    ids=str,
)  # fmt: skip
def test_damaged_peak_is_an_error_that_names_the_file_and_the_entry(entry: Any, tmp_path: Path) -> None:
    (tmp_path / "peaks.json").write_text(json.dumps({"whole": RECORDED, "ok, h100": entry}))
    with pytest.raises(ConfigError, match=r"peaks\.json: the peak of 'ok, h100' .* --update-peaks"):
        read_peaks(tmp_path / "peaks.json")


def test_update_replaces_only_its_own_peaks_and_keeps_the_order(tmp_path: Path) -> None:
    peaks = tmp_path / "peaks.json"
    assert read_peaks(peaks) == {}
    update_peaks(peaks, {"b": RECORDED, "c": RECORDED})
    before = peaks.read_text().splitlines()
    update_peaks(peaks, {"b": peak_of(result(11, 12)), "a": RECORDED})
    after = peaks.read_text().splitlines()
    assert [*json.loads("\n".join(after))] == ["a", "b", "c"]
    assert (read_peaks(peaks)["c"], read_peaks(peaks)["b"]["allocated_bytes"]) == (RECORDED, 11 * GIB)
    assert after[-len(before) + before.index('  "c": {') :] == before[before.index('  "c": {') :]
    peaks.write_text("[]")
    with pytest.raises(ConfigError, match=r"peaks\.json cannot be read"):
        read_peaks(peaks)


def test_case_is_expanded_to_each_gpu_and_rank_with_the_defaults_that_apply_to_it(tmp_path: Path) -> None:
    (tmp_path / "fits.toml").write_text("""
        [defaults]
        growth_percent = 2
        memory_overhead = "2GiB"
        [[case]]
        name = "8b"
        command = "train.py --rows 4"
        gpu = ["h100", "a100-40"]
        ranks = [4, 8]
        growth_percent = 5
        [[case]]
        command = "other.py"
        [[case]]
        command = "a.py --rows {1:64}"
        [[case]]
        name = "a\\u001bb"
        command = "b.py"
        fits = false
    """)
    cases = read_cases(tmp_path / "fits.toml")
    assert {case.name: case.expected.growth_percent for case in cases} == {
        "8b, h100 × 4": 5,
        "8b, a100-40 × 4": 5,
        "8b, h100 × 8": 5,
        "8b, a100-40 × 8": 5,
        "other.py, h100": 2,
        "a.py --rows {1:64}, h100": None,
        "a\\x1bb, h100": None,
    }
    assert (cases[1].gpu.name, cases[1].ranks) == ("a100-40", 4)
    assert cases[1].options == {"command": "train.py --rows 4", "memory_overhead": "2GiB"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[case]]\ncommand = 'a.py'\ngpus = 'h100'", r"case 1: unknown key 'gpus'; did you mean gpu\?"),
        (
            "[defaults]\nreserved = '1GiB'\n[[case]]\nname = 'x'\ncommand = 'a.py'",
            r"\[defaults\] has an unknown key 'reserved'",
        ),
        ("[[cases]]\ncommand = 'a.py'", "fits.toml has cases: write"),
        ("[[case]]\nname = 'x'", "case x: a command is needed"),
        ("[[case]]\ncommand = 'a.py'\ngpu = 'h1000'", "unknown GPU 'h1000'"),
        ("[[case]]\ncommand = 'a.py'\n[[case]]\ncommand = 'a.py'", "two cases are named 'a.py, h100'"),
        ("[[case]]\ncommand = 'a.py'\nreserved_below = 'x'", "case 1: reserved_below is 'x'"),
        ("[[case]]\ncommand = 'a.py'\ngpu = []", "case 1: gpu is an empty list"),
        ("[[case]]\ncommand = 'a.py'\nranks = []", "case 1: ranks is an empty list"),
        ("[[case]]\ncommand = 'a.py {1:9}'\ngrowth_percent = 2", "case 1: growth_percent .* at_least"),
        ("[[case]]\ncommand = 'a.py'\ngrowth_percent = 2\nfits = false", "case 1: growth_percent"),
        ("case = 5", r"fits.toml has (case|defaults): write \[\[case"),
        ("case = [5]", r"fits.toml has (case|defaults): write \[\[case"),
        ("[case]\ncommand = 'a.py'", r"fits.toml has (case|defaults): write \[\[case"),
        ("defaults = 5", r"fits.toml has (case|defaults): write \[\[case"),
        ("[[case]]\ncommand = ", "fits.toml: "),
        ("", "has no case"),
    ],
)
def test_invalid_file_of_cases_is_an_error_that_names_the_case(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "fits.toml").write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_cases(tmp_path / "fits.toml")
