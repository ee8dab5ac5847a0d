"""Rehearsals from Python, from pytest and from files of cases."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest import mock

import pytest

from gpu_rehearsal import interface
from gpu_rehearsal.ci import cases
from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.sweep import in_parallel
from tests.conftest import Rehearse, run_program
from tests.processes import skip_without_null_device
from tests.scripts import TRAINS, WEIGHTS

EXAMPLE = Path(__file__).parents[1] / "examples" / "ci"
GIB = 2**30


def rehearse_cases(folder: Path, cases: str, status: int) -> tuple[list[dict[str, Any]], str]:
    """Rehearse cases of train.py and other scripts; return the rows and the output of the scripts."""
    (folder / "train.py").write_text(dedent(TRAINS))
    (folder / "fits.toml").write_text(cases)
    ended = run_program(folder, "rehearse", "--cases", "fits.toml", "--format", "json")
    assert ended.returncode == status, ended.stdout + ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.mark.smoke
def test_python_returns_what_the_command_prints(
    rehearse: Rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = rehearse(TRAINS, "--gpu", "4090", "--memory-overhead", "2GiB", command=("train.py", "100", "60000")).found
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = interface.rehearse("train.py 100 60000", "4090", memory_overhead="2GiB", quiet=True)
    returned = json.loads(json.dumps(found.as_dict()))
    assert min(printed.pop("cpu_s"), returned.pop("cpu_s")) > 0
    assert returned == printed
    assert found.fits
    kinds = found.peak_by_kind
    assert (kinds["parameters"], kinds["gradients"], kinds["optimizer"]) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS)
    assert sum(kinds.values()) == found.run_peaks["allocated_bytes"]
    assert kinds["activations and other"] > 3 * 60000 * 4096 * 4


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"steps": "3"}, "steps is '3'"),
        ({"rank": 1, "together": True}, "leave out one of them"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_invalid_argument_is_an_error_before_the_script_starts(options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        interface.rehearse([__file__], **options)  # type: ignore[arg-type]


@pytest.mark.smoke
def test_larger_config_is_reported_by_kind_and_a_killed_script_does_not_end_the_other_cases(tmp_path: Path) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "ci.md").read_text()
    assert f"# fits.toml\n{(EXAMPLE / 'fits.toml').read_text()}```" in page
    shutil.copytree(EXAMPLE, folder := tmp_path / "repository")
    killed = 'name = "killed"\ncommand = "killed.py"'
    (folder / "fits.toml").write_text(f"{(folder / 'fits.toml').read_text()}\n[[case]]\n{killed}\n")
    (folder / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    medium = folder / "configs" / "medium.json"
    medium.write_text(medium.read_text().replace('"vocabulary": 32000', '"vocabulary": 53248'))
    github = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(folder), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    ended = run_program(folder, "rehearse", "--cases", "fits.toml", "--jobs", "2", **github)
    assert ended.returncode == 2, ended.stderr
    (line,) = re.findall(r"(?m)^::error file=train.py,line=(\d+),title=medium%2C a100-40::", ended.stderr)
    assert f"step 2 runs out of memory at train.py:{line}: nn.functional.cross_entropy" in ended.stdout
    assert (folder / "summary").read_text().count("\n| medium, a100-40 | a100-40 | 2 | **2.98 GiB") == 1
    table = ended.stdout.partition("\n\n")[0]
    small, _, medium_row, _, killed_row = table.splitlines()[1:]
    assert re.search(r" 4090 +1 +yes .* small, 4090  \+0.00 GiB$", small)
    (grown,) = re.findall(r" yes .* medium, a100-40  \+(\d.\d\d) GiB  <- NOT AS EXPECTED$", medium_row)
    assert 1.5 < float(grown) < 1.7
    assert re.search(r" no answer .* killed, h100  <- NOT AS EXPECTED$", killed_row)
    assert "\nmedium, a100-40: 2.98 GiB (" in ended.stdout
    assert f"\n{grown} GiB (" in ended.stdout
    assert re.search(rf"reserved in all .* \+{grown} GiB", ended.stdout)


CRASHES = """
import os
print("reading", flush=True)
os.write(2, b"a warning\\n" * 2000)
def read(path):
    exec(compile('{}["rows"]', "library/compiled.pyx", "exec"))
read("data")
"""


def test_crashed_case_names_the_line_and_keeps_the_complete_output(tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    (tmp_path / "fits.toml").write_text("[[case]]\nname = 'fïrst'\ncommand = 'crashes.py'\n")
    ended = run_program(tmp_path, "rehearse", "--cases", "fits.toml", PYTHONIOENCODING="ascii")
    verdict = "no answer: the script failed in step 1 at crashes.py:6: KeyError: 'rows'"
    assert (ended.returncode, f"f?rst, h100: {verdict}\n" in ended.stdout) == (2, True), ended.stdout + ended.stderr
    assert "reading\n" in ended.stderr
    assert ended.stderr.count("a warning\n") == 2000
    assert 'File "crashes.py", line 6, in read\n' in ended.stderr.replace(f"{tmp_path}/", "")


LEAVES_THINGS = """
    import os, subprocess, sys, torch
    left = os.environ.get("LEFT"), getattr(torch, "left", None)
    card = torch.cuda.get_device_properties(0)
    with open("seen.txt", "a") as seen:
        seen.write(f"{os.getppid()} {left} {torch.cuda.device_count()} {card.total_memory} {card.major}\\n")
    os.environ["LEFT"], torch.left = "1", 1
    open("child.txt", "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
    os.chdir("/")
"""


def test_cases_share_imports_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(dedent(LEAVES_THINGS) + dedent(TRAINS))
    sizes = "gpu = ['a100-40', 'h100']\nranks = [1, 2]\nmemory_overhead = '2GiB'"
    together, _ = rehearse_cases(tmp_path, f"[[case]]\ncommand = 'leaves.py 100 600'\n{sizes}\n", 0)
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    assert len({line.split()[0] for line in seen}) == 1
    assert {line.split(maxsplit=1)[1] for line in seen} == {
        f"(None, None) {row['ranks']} {row['usable_bytes']} {8 + (row['gpu'] == 'h100')}" for row in together
    }
    wait_until(lambda: not Path("/proc", (tmp_path / "child.txt").read_text()).exists(), 20)
    alone = run_program(
        tmp_path, "rehearse", "--gpu", "h100", "--ranks", "2", "--memory-overhead", "2GiB",
        "--format", "json", "--", "leaves.py", "100", "600",
    )  # fmt: skip
    peaks = json.loads(alone.stdout)["rank_peaks"][0]
    assert [together[-1][name] for name in ("allocated_bytes", "reserved_bytes")] == [*peaks.values()][1:]
    assert 0 < together[1]["cpu_s"] < together[0]["cpu_s"]  # the first has imported torch


def test_case_that_does_not_end_is_killed_after_its_timeout(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text("while True: pass\n")
    cases = "[[case]]\ncommand = 'loops.py'\ntimeout = 0.5\n[[case]]\ncommand = 'train.py 100'\ntimeout = 60\n"
    (looping, training), _ = rehearse_cases(tmp_path, cases, 2)
    assert (looping["fits"], training["fits"]) == (None, True)
    assert "did not end within 0.5 s and was killed in step 1: raise --timeout" in looping["verdict"]


PRINTS_PID = "print(getattr(child, 'pid', ''), file=open('child.txt', 'a'), end='')"
DISTURBS = {
    "kills the process that imports torch": "os.kill(os.getppid(), 9)",
    "leaves its process group": "os.setpgid(0, os.getppid())",
    "leaves a process that prints": "subprocess.Popen(['sh', '-c', PRINTS], stdout=2, start_new_session=True)",
}


def test_script_does_not_disturb_the_next_case(tmp_path: Path) -> None:
    skip_without_null_device()
    cases = []
    for at, (name, line) in enumerate(DISTURBS.items()):
        end = "os.kill(os.getpid(), 9)" if "prints" in name else "time.sleep(600)"
        header = "import os, subprocess, time\nPRINTS = 'while sleep 0.2; do echo of another case; done'"
        (tmp_path / f"{at}.py").write_text(f"{header}\nchild = {line}\n{PRINTS_PID}\n{end}\n")
        cases += [f"[[case]]\nname = '{name}'\ncommand = '{at}.py'", f"[[case]]\nname = '{at}'\ncommand = 'train.py 9'"]
    (tmp_path / "crashes.py").write_text("print('my own output')\nraise ValueError\n")
    cases.append("[[case]]\nname = 'crashes'\ncommand = 'crashes.py'")
    text = "[defaults]\ntimeout = 2\n" + "\n".join(cases).replace("9'", "9'\ntimeout = 90")
    try:
        found, errors = rehearse_cases(tmp_path, text, 2)
    finally:
        os.killpg(int((tmp_path / "child.txt").read_text()), signal.SIGKILL)
    rows = {row["case"]: row for row in found}
    assert [rows[f"{at}, h100"]["fits"] for at in range(3)] == [True] * 3, errors
    assert "signal 9" in rows["kills the process that imports torch, h100"]["verdict"]
    assert "did not end within 2 s" in rows["leaves its process group, h100"]["verdict"]
    output = errors.partition("output of crashes, h100:")[2].partition(", h100: ")[0]
    assert "my own output" in output
    assert "of another case" not in output


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=lambda stop: stop.name)
def test_stopped_job_has_the_peaks_of_cases_that_have_ended(tmp_path: Path, stop: signal.Signals) -> None:
    skip_without_null_device()
    (tmp_path / "train.py").write_text(dedent(TRAINS))
    (tmp_path / "waits.py").write_text(
        "import os, time\nopen('waits.txt', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    (tmp_path / "fits.toml").write_text(
        "[defaults]\ngrowth_percent = 1\n[[case]]\ncommand = 'train.py 100'\n[[case]]\ncommand = 'waits.py'\n"
    )
    words = (str(Path(sys.executable).with_name("rehearse")), "--cases", "fits.toml", "--update-peaks")
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        wait_until(lambda: (tmp_path / "waits.txt").exists() and (tmp_path / "fits.peaks.json").exists(), 240)
        job.send_signal(stop)
        table, _ = job.communicate(timeout=60)
    if stop is signal.SIGINT:  # the table has the case that has ended
        assert job.returncode == 130
        assert [line.split()[-1] for line in table.splitlines()[1:2]] == ["GiB"], table
        assert "1 case, 0 not as expected" in table
        assert "recorded the peaks in fits.peaks.json" in table
    wait_until(lambda: not Path("/proc", (tmp_path / "waits.txt").read_text().strip()).exists(), 20)
    assert [*json.loads((tmp_path / "fits.peaks.json").read_text())] == ["train.py 100, h100"]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_failed_case_ends_its_workers_and_no_other_process() -> None:
    other = multiprocessing.Process(target=time.sleep, args=(60,))
    other.start()
    others = {*multiprocessing.active_children()}  # earlier tests may have left servers
    try:
        with pytest.raises(ValueError, match="invalid literal"):
            [*in_parallel(int, {1: ("x",)})]
        assert other.is_alive()
        wait_until(lambda: others.issuperset(multiprocessing.active_children()), 20)
    finally:
        other.kill()
        other.join()


def test_peaks_that_cannot_be_written_are_an_error_after_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fits.toml").write_text(
        "[defaults]\ngrowth_percent = 1\n[[case]]\ncommand = 'a.py 1'\n[[case]]\ncommand = 'a.py 2'\n"
    )
    peaks = {"allocated_bytes": GIB, "reserved_bytes": GIB, "flushes": 0}
    fits = RehearsalResult(2 * GIB, 0, 0, 1, status=0, steps=[{"step": step, **peaks} for step in (1, 2)])
    monkeypatch.setattr(cases, "peak_of", lambda _: {**peaks, "by_kind": {}})
    monkeypatch.setattr(cases, "in_parallel", lambda _, given, jobs: [(name, fits) for name in given])
    monkeypatch.setattr(cases, "update_peaks", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert cases.run_cases(tmp_path / "fits.toml", 1, True, as_json=False) == 2
    printed = capsys.readouterr()
    assert "fits.peaks.json cannot be written: Permission denied" in printed.err
    assert "2 cases" in printed.out


def test_update_of_peaks_without_an_expectation_names_it(tmp_path: Path) -> None:
    (tmp_path / "fits.toml").write_text("[[case]]\ncommand = 'a.py'\n")
    with pytest.raises(ConfigError, match=r"no case of .*fits\.toml has growth_percent"):
        cases.run_cases(tmp_path / "fits.toml", 1, True, as_json=False)


TESTS = """
    import sys

    def test_torch_is_not_imported():
        assert "torch" not in sys.modules

    class TestSmall:
        def test_fits(self, rehearse):
            found = rehearse("train.py 100", gpu="4090", growth_percent=2, reserved_below="2GiB")
            assert found.fits
            assert "torch" not in sys.modules

    def test_range_with_growth(rehearse):
        import pytest
        with pytest.raises(Exception, match="growth_percent .* at_least"):
            rehearse("train.py {1:9}", growth_percent=2)

    def test_without_recorded_peak(rehearse):
        rehearse("train.py 100", gpu="4090")
"""


@pytest.mark.smoke
def test_fixture_of_pytest_fails_a_test_whose_peak_has_grown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(TRAINS))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_fits.py").write_text(dedent(TESTS))
    ended = run_program(tmp_path, "pytest", "-q", "--update-peaks")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    recorded = json.loads((tmp_path / "tests" / "peaks.json").read_text())
    assert recorded["test_fits.py::TestSmall::test_fits"]["by_kind"]["optimizer"] == 2 * WEIGHTS
    assert len(recorded) == 1
    assert ended.stdout.count("records nothing for a rehearsal without growth_percent") == 1
    (tmp_path / "train.py").write_text(dedent(TRAINS).replace("range(4)", "range(5)"))
    ended = run_program(tmp_path, "pytest", "-q")
    assert ended.returncode == 1
    assert re.search(
        r"^320.00 MiB \(25.0 %\) more allocated than the recorded 1.25 GiB.* run once with --update-peaks\n"
        r"\(train.py 100, 4090\)\n",
        ended.stdout,
        re.MULTILINE,
    ), ended.stdout
    assert "FAILED tests/test_fits.py::TestSmall::test_fits - Failed: 320.00 MiB" in ended.stdout
    assert re.search(r"optimizer +512.00 MiB +640.00 MiB +\+128.00 MiB\n", ended.stdout)
    assert re.search(r"with 1.4. GiB, step 1 runs out of memory at .*train.py:\d+: ", ended.stdout)


def test_action_fails_on_a_case_that_has_grown_and_says_what_to_do(tmp_path: Path) -> None:
    """The last step of the action, in an environment in which the package is installed already."""
    skip_without_null_device()
    (tmp_path / "train.py").write_text(dedent(TRAINS))
    (tmp_path / "my fits.toml").write_text("[[case]]\nname = 'a'\ncommand = 'train.py 100'\ngrowth_percent = 2\n")
    recorded = {"allocated_bytes": GIB, "reserved_bytes": GIB, "by_kind": {}}
    (tmp_path / "my fits.peaks.json").write_text(json.dumps({"a, h100": recorded}))
    (tmp_path / ".venv-rehearsal").symlink_to(Path(sys.executable).parents[1])
    step = (EXAMPLE.parents[1] / "action.yml").read_text().rpartition("run: |\n")[2]
    github = {"CASES": "my fits.toml", "JOBS": "2", "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "summary.md"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", dedent(step)]  # as GitHub starts a step
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, **github}, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"(?m)^::error file=.*train.py,line=10,title=a%2C h100::.*--update-peaks", ended.stderr)
    assert (
        " more allocated than the recorded 1.00 GiB; growth_percent is 2. If" in (tmp_path / "summary.md").read_text()
    )
