"""Verdicts about scripts that fail, end early, are interrupted, or cannot be followed."""

import re
import signal
import subprocess
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from gpu_rehearsal.report.result import RehearsalResult
from tests.conftest import Rehearse
from tests.scripts import GIB, ONE_STEP, lines_of, marked

BOX = """
import sys
print("╭── Error ──────────────╮\\n│No such option: --rows │\\n│Try --help             │\\n╰──────╯", file=sys.stderr)
sys.exit(2)
"""
FAILED = """
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
raise ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "")})
"""
KILLED = """
import os, torch
try: torch.empty(2**40, device="cuda")
except RuntimeError: os.kill(os.getpid(), 9)
"""


@pytest.mark.smoke("raises")
@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("raise ValueError('no such data')", "failed in step 1 at train.py:1: ValueError: no such data"),
        ("import os; os.write(2, b'error: no data\\n50 %'); exit(1)", "failed in step 1 at train.py:1: error: no data"),
        (BOX, "failed in step 1 at train.py:4: No such option: --rows Try --help"),
        (FAILED, "failed in step 1 at train.py:3: ChildFailedError: train.py FAILED"),
        ("print(1)", "took no optimizer step, but its process allocated no GPU memory"),
    ],
    ids=["raises", "prints and exits", "prints a box", "torchrun", "no training"],
)
def test_script_without_a_step_gives_no_prediction(rehearse: Rehearse, script: str, verdict: str) -> None:
    assert rehearse(script, status=2).found["verdict"] == f"no answer: the script {verdict}"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (KILLED, "signal 9 (Killed) ended the script in step 1 (is this machine out of memory?)"),
        ("import torch.distributed as dist; dist.broadcast_object_list([None])",
         "rank 3 waits for objects of another rank: rehearse rank 0, or --together"),
    ],
    ids=["killed", "waits for rank 0"],
)  # fmt: skip
def test_reason_outside_the_script_is_named(rehearse: Rehearse, script: str, reason: str) -> None:
    found = rehearse(script, "--ranks", "4", "--rank", "3", json_format=False, status=2).found
    assert found.startswith(f"no answer: {reason}\n")


def test_script_that_raises_another_error_after_oom_does_not_fit_unless_it_went_on(rehearse: Rehearse) -> None:
    script = """
        import torch

        train = torch.optim.SGD([torch.ones(8, device="cuda", requires_grad=True)])
        try:
            torch.empty(2**40, device="cuda")
        except torch.OutOfMemoryError:
            raise RuntimeError("training has failed")
    """
    assert rehearse(script, status=1).found["fits"] is False
    answer = rehearse(script.replace("raise", "train.step()\n            raise"), status=2)
    assert "failed in step 2 at train.py:9: RuntimeError: training has failed" in answer.found["verdict"]
    answer = rehearse(script.replace('failed")', 'failed") from None'), status=2)
    assert answer.found["verdict"].endswith("training has failed; it ran out of memory before (see below)")


def test_script_that_exits_after_a_caught_oom_has_no_verdict(rehearse: Rehearse) -> None:
    script = f"""
    {ONE_STEP.strip()}
    try:
        torch.empty(2**40, device="cuda")
    except torch.OutOfMemoryError:
        pass
    if os.fork() == 0:
        import time
        time.sleep(600)  # unless it is killed, readers of its output would wait this long
    sys.exit(0 if len(sys.argv) == 1 else "that is all")
    """
    found = rehearse(script, status=2).found
    assert (found["fits"], len(found["caught"])) == (None, 1)
    assert "no step followed, but the script ended with success" in found["verdict"]
    assert rehearse(script, command=("train.py", "text")).printed.endswith("that is all\n")


BATCHES = {
    "count of a mask": """
        count = int((torch.randn(64, device="cuda") > 0).sum())  # guessed
        rows = torch.zeros(count, 1024, device="cuda").view(count, -1)
    """,
    "unique": """
        kinds = torch.randint(0, 64, (4096,), device="cuda").unique()  # guessed
        kinds[1]
        rows = torch.zeros(kinds.numel(), 1024, device="cuda")
    """,
    "longest": """
        lengths = (torch.randint(0, 9, (8, 64), device="cuda") > 0).sum(1)
        rows = torch.stack([torch.zeros(1024, device="cuda") for _ in range(int(lengths.max()))])  # guessed
    """,
}
"""The number of rows, 64 at most, depends on a value whose smallest guess is an error."""
COUNTED = """
    import torch

    open("runs", "a").write("x")
"""
USED = """
    print("rows", rows.numel() // 1024, flush=True)
    model = torch.nn.Linear(1024, 1024).cuda()
    model(rows).sum().backward()
    torch.optim.SGD(model.parameters()).step()
"""


@pytest.mark.smoke("longest")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_error_that_a_small_guess_has_caused_is_avoided_by_the_largest(
    rehearse: Rehearse, tmp_path: Path, batch: str
) -> None:
    script = "".join(map(dedent, (COUNTED, batch, USED)))
    answer = rehearse(script, "--steps", "1", status=0)
    (line,) = marked(script)
    assert "rows 64\n" in answer.printed
    assert f"; memory depends on a guessed value at train.py:{line} (see below)" in answer.found["verdict"]
    assert lines_of(answer.found["guesses"]) == [line]
    assert len((tmp_path / "runs").read_text()) == 3  # the second without following numbers


def test_error_that_the_largest_value_does_not_avoid_stays_the_answer(rehearse: Rehearse, tmp_path: Path) -> None:
    batch = BATCHES["longest"] + "    raise ValueError(f'{len(rows)} rows')\n"
    script = "".join(map(dedent, (COUNTED, batch)))
    answer = rehearse(script, status=2)
    assert "RuntimeError: stack expects a non-empty TensorList" in answer.found["verdict"]
    assert "ValueError: 64 rows" in answer.printed
    assert (answer.found["guesses"], len((tmp_path / "runs").read_text())) == ([], 3)
    rehearse(script, "--once", status=2)
    assert len((tmp_path / "runs").read_text()) == 3 + 2


CHILDREN = """
    import subprocess, sys, torch

    def train(rank):
        torch.zeros(1024, device="cuda")
        subprocess.run(["sleep", "100"], timeout=200)

    if __name__ == "__main__":
        if sys.argv[1:] == ["launcher"]:
            subprocess.run([sys.executable, "-u", "train.py", "worker"], timeout=200)
        elif sys.argv[1:] == ["worker"]:
            train(0)
        else:
            process = torch.multiprocessing.get_context("spawn").Process(target=train, args=(0,))
            process.start()
            process.join()
"""


@pytest.mark.smoke("a command")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [(("launcher",), "rehearse that command instead, with --ranks: train.py worker"), ((), "a separate script")],
    ids=["a command", "multiprocessing"],
)
def test_process_that_uses_a_gpu_and_cannot_be_followed_ends_the_rehearsal(
    rehearse: Rehearse, words: tuple[str, ...], remedy: str
) -> None:
    answer = rehearse(CHILDREN, command=("train.py", *words), status=2)
    assert "the script starts processes that use a GPU" in answer.found["verdict"]
    assert remedy in answer.found["verdict"]


def test_script_that_python_cannot_parse_has_no_answer_on_any_number_of_ranks(rehearse: Rehearse) -> None:
    answer = rehearse("def (", "--ranks", "1,2")
    assert [row["fits"] for row in answer.found] == [None, None]
    assert "SyntaxError" in answer.found[0]["verdict"]


ENDS_LATE = """
    import os, signal, sys, torch

    if sys.argv[1:]:
        signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "deaf" else lambda *_: sys.exit(0))
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.step()
    parent = open(f"/proc/{os.getppid()}/stat").read().split()[3]  # of the process that imports torch
    os.kill(int(parent), signal.SIGTERM)
    signal.pause()
"""


def test_signal_ends_background_jobs_and_processes_that_ignore_it(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs
    monkeypatch.setattr("subprocess.run", partial(subprocess.run, preexec_fn=ignore_interrupts))
    for words in (), ("deaf",), ("saves",):
        answer = rehearse(ENDS_LATE, command=("train.py", *words), status=2)
        at = "" if words == ("deaf",) else r" at train\.py:\d+"
        before = r"; before that, 0\.05 of 77\.8 GiB reserved at most \(step 1\)"
        assert re.fullmatch(f"no answer: interrupted in step 3{at}{before}", answer.found["verdict"])
        assert (len(answer.found["steps"]), answer.found["fits"]) == (2, None)


INTERRUPTED_AGAIN = """
    import os, signal, torch

    first = not os.path.exists("again")
    open("again", "w").close()
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        loss = model(torch.zeros(8, 1024, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        if loss.item() > 1:
            print('high')
    if not first:
        parent = open(f"/proc/{os.getppid()}/stat").read().split()[3]  # of the process that imports torch
        os.kill(int(parent), signal.SIGINT)
        signal.pause()
"""


def test_interrupted_rehearsal_with_random_values_keeps_the_result_with_the_usual_ones(rehearse: Rehearse) -> None:
    answer = rehearse(INTERRUPTED_AGAIN, status=2)
    expected = "no answer: interrupted in the rehearsals with random values; before that, 0.05 of 77.8 GiB reserved"
    assert answer.found["verdict"].startswith(expected)
    assert len(answer.found["steps"]) == 2


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("KeyError: 'LOCAL_RANK'", "put torchrun before the script)"),
        ("RuntimeError: Could not find nvcc", "VLLM_USE_FLASHINFER_SAMPLER=0)"),
    ],
)
def test_error_names_its_remedy(error: str, remedy: str) -> None:
    end = {"allocated_bytes": 0, "reserved_bytes": 0, "flushes": 0, "error": error, "notes": []}
    failed = RehearsalResult(10 * GIB, GIB, rank=0, ranks=1, status=1, end=end)
    assert failed.verdict().endswith(remedy)
