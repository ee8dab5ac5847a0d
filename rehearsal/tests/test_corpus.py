"""No rehearsal predicts too little memory without a warning: scripts whose memory depends on computed values.

`python -m tests.test_corpus [NAME ...]` prints the peaks and warnings of these scripts as a table.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Rehearse, run_program

CORPUS = Path(__file__).with_name("corpus.py")
SOURCES = {
    each.name: each
    for each in ast.parse(CORPUS.read_text()).body
    if isinstance(each, ast.FunctionDef) and [argument.arg for argument in each.args.args] == ["step"]
}
FAST = {"layer_drop", "size_from_a_float"}
IN_LATER_STEPS = {"longer_rows_later", "evaluation_later", "unfrozen_later", "replay_buffer"}


def rehearse_script(name: str, *options: str, **variables: str) -> dict[str, Any]:
    command = (str(CORPUS), name, "25" if name in IN_LATER_STEPS else "3")
    words = ("rehearse", "--format", "json", *options, "--", *command)
    answer = run_program(CORPUS.parent, *words, **variables)
    found: dict[str, Any] = json.loads(answer.stdout)
    assert found["fits"], answer.stderr
    return found


def peak_of(found: dict[str, Any]) -> int:
    return max(each["allocated_bytes"] for each in (*found["steps"], found["after_last_step"]))


def marked_lines(name: str) -> set[int]:
    """Return the lines that read a value of the GPU on which memory depends."""
    first, last = SOURCES[name].lineno, SOURCES[name].end_lineno
    lines = CORPUS.read_text().splitlines()[:last]
    return {number for number, line in enumerate(lines, 1) if number > first and line.endswith("# here")}


def named_lines(found: dict[str, Any]) -> set[int]:
    """Return the lines of the script that the report names."""
    return {int(each.rpartition(":")[2]) for each in found["guesses"] if each.startswith(str(CORPUS))}


def print_row(name: str) -> None:
    """Print exact and rehearsed peak, the lines in the verdict, and the CPU seconds of the rehearsal with guesses."""
    exact = peak_of(rehearse_script(name, "--steps", "0", KNOWN="1"))
    found = rehearse_script(name)
    scope, lines = found["verdict"].partition(":")[0], sorted(named_lines(found))
    peaks = f"{exact / 2**20:.0f} | {peak_of(found) / 2**20:.0f}"
    print(f"| {name} | {peaks} | {scope} | {', '.join(map(str, lines))} | {found['cpu_s']:.1f} |", flush=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.smoke] * (each in FAST)) for each in SOURCES if each not in IN_LATER_STEPS],
)
def test_too_low_a_peak_has_a_warning_with_its_line(name: str) -> None:
    exact, found = peak_of(rehearse_script(name, KNOWN="1")), rehearse_script(name)
    assert peak_of(found) >= exact or marked_lines(name) & named_lines(found)


@pytest.mark.parametrize("name", sorted(IN_LATER_STEPS))
def test_verdict_says_how_many_steps_it_covers(name: str) -> None:
    found, whole = rehearse_script(name), rehearse_script(name, "--steps", "0")
    assert peak_of(whole) > 1.02 * peak_of(found)
    assert found["verdict"].startswith("fits in the first 10 steps: ")
    assert whole["verdict"].startswith("fits: ")


PRELUDE = """
    import torch

    layer = torch.nn.Linear(256, 256, device="cuda")
    sparse = torch.eye(256).to_sparse().cuda()
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        x = layer(torch.randn(64, 256, device="cuda"))
"""
UPDATE = """
        x.sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "line", ["x = torch.fft.fft(x).real", "torch.linalg.eigh(x.detach().T @ x.detach())", "sparse @ x.T.detach()"]
)
def test_memory_that_is_not_counted_has_a_warning(line: str, rehearse: Rehearse) -> None:
    answer = rehearse(f"{PRELUDE}        {line}{UPDATE}", status=0)
    assert "; not all memory is counted (see below)" in answer.found["verdict"]
    notes = answer.found["after_last_step"]["notes"]
    assert any("workspaces of cuFFT, cuSOLVER and cuSPARSE" in note for note in notes)


FINITE = """
        if torch.isnan(x).any() or not torch.isfinite(x).all() or torch.isinf(x).sum() > 0:
            raise SystemExit("not finite")
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = layer(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        plateau.step(loss)
        print(f"loss {loss.item():.3f}, mean {sum([loss.item()]) / 1:.2f}, at most {max(0.0, loss.item())}")
        optimizer.zero_grad()
        losses.append(loss.item())
        assert math.isfinite(float(loss))
        print(f"mean {np.mean(losses)}, perplexity {round(math.exp(float(loss)), 2)}")
        for at, value in enumerate(x.detach().float().cpu().numpy()):
            if at % 32 == 0:
                print(value.mean())
"""


def test_checks_and_logs_have_no_warning(rehearse: Rehearse) -> None:
    setup = """
    import math
    import numpy as np
    losses = []
    scaler = torch.amp.GradScaler("cuda")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
"""
    answer = rehearse(PRELUDE.replace("    for step", f"{setup}    for step") + FINITE, status=0)
    assert answer.found["guesses"] == []


SIZED = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        share = torch.rand(1, device="cuda")
        noise = torch.rand(1, device="cuda").item()
        rows = int(2**19 * share.item())
        print(torch.rand(1, device="cuda").item())
        layer(torch.ones(rows + 1, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


def test_script_that_fits_with_some_values_only_has_no_answer_until_the_value_is_stated(rehearse: Rehearse) -> None:
    answer = rehearse(SIZED, "--memory", "4GiB")
    assert (answer.status, answer.found["guesses"]) == (2, ["train.py:9"])
    assert "runs out of memory with random values at train.py:9" in answer.found["verdict"]
    stated = rehearse(SIZED, "--memory", "4GiB", "--fixed", "train.py:9=0.25")
    assert (stated.status, stated.found["guesses"]) == (0, [])
    assert peak_of(stated.found) > 2 * 2**17 * 1024 * 4


def test_size_that_depends_on_time_is_named(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        first, second = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
        layer(torch.ones(1024 if second < first else 512, 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    answer = rehearse(script, status=0)
    assert answer.found["guesses"] == ["train.py:11"]


def test_script_that_finds_its_own_files_is_not_compared_with_itself(rehearse: Rehearse) -> None:
    script = """
    import os
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    rows = 4096 if os.path.exists("saved") else 512
    layer(torch.ones(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
    open("saved", "w").write(str(layer.weight.sum().item()))
    """
    answer = rehearse(script, json_format=False, status=0)
    assert "does the script find files that it has written?" in answer.found


@pytest.mark.parametrize(
    ("call", "differs"),
    [
        ("dist.all_reduce(rows, dist.ReduceOp.MAX)", True),
        ("dist.broadcast(rows, src=1)", True),
        ("dist.broadcast(rows, src=0)", False),
        ("dist.all_gather(each := [rows.clone(), rows.clone()], rows); rows = max(each)", True),
        ("dist.all_gather(each := [rows.clone(), rows.clone()], rows); rows = each[0]", False),
        ("dist.all_gather_object([None] * 2, {'rows': 4096})", False),
    ],
)
def test_size_that_another_rank_may_decide_is_named(call: str, differs: bool, rehearse: Rehearse) -> None:
    script = f"""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    rows = torch.tensor(4096, device="cuda")
    {call}
    layer(torch.ones(int(rows), 1024, device="cuda")).sum().backward()
    optimizer.step()
    """
    answer = rehearse(script, "--ranks", "2", status=0)
    assert answer.found["guesses"] == ["train.py:9"] * differs


def test_script_that_takes_more_steps_with_other_values_is_named(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    best = float("inf")
    for step in range(8):
        layer(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.rand(1, device="cuda").item()
        if loss >= best:
            print("no longer better")
            break
        best = loss
    """
    answer = rehearse(script, status=0)
    assert len(answer.found["steps"]) == 2
    assert "the number of steps depends on a guessed value at train.py:11" in answer.found["verdict"]


def test_sparse_tensors_and_tensors_without_dimensions_have_no_limits(rehearse: Rehearse) -> None:
    script = """
    import torch

    sparse, single = torch.eye(64).to_sparse().cuda(), torch.ones((), device="cuda")
    assert torch.sparse.sum(sparse, 0).shape == sparse.long().sum(0).shape == (64,)
    assert single.argsort().shape == single.argmax().shape == ()
    """
    rehearse(script, status=0)


def test_torchscript_runs_and_the_gpu_has_its_name(rehearse: Rehearse) -> None:
    script = """
    import torch

    @torch.jit.script
    def doubled(x: torch.Tensor, rows: int) -> torch.Tensor:
        return 2 * x.sum() + torch.arange(rows, device=x.device).sum()

    doubled(torch.ones(2**20, device="cuda"), 7)
    assert "L40S" in torch.cuda.get_device_name(), torch.cuda.get_device_name()
    """
    rehearse(script, "--gpu", "l40s", status=0)


def test_layer_drop_has_the_report_shown_on_the_page(rehearse: Rehearse) -> None:
    page = (CORPUS.parents[1] / "docs" / "rehearsing.md").read_text()
    (script,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    report = rehearse(script, json_format=False).found.splitlines()
    assert all(f"    {line}\n" in page for line in (report[0], *report[-3:]))


@pytest.mark.parametrize("steps", ["2", "0"])
def test_optimizer_that_has_not_stepped_yet_gives_no_answer(rehearse: Rehearse, steps: str) -> None:
    script = """
    import torch

    first, second = (torch.nn.Linear(256, 256, device="cuda") for _ in range(2))
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (first, second)]
    for step in range(4):
        x = second(first(torch.randn(64, 256, device="cuda")))
        x.sum().backward()
        optimizers[0].step()
    """
    answer = rehearse(script, "--steps", steps)
    assert (answer.status, answer.found["fits"]) == ((2, None) if steps == "2" else (0, True)), answer.printed


def test_nvidia_smi_reports_the_memory_of_the_card(rehearse: Rehearse) -> None:
    script = """
    import subprocess, torch

    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    for chosen, count in ([], 2), (["-i", "0,1"], 2), (["-i", "1"], 1):
        sizes = [int(each) for each in subprocess.check_output([*query, *chosen], text=True, timeout=60).split()]
        assert sizes == [torch.cuda.get_device_properties(0).total_memory >> 20] * count, sizes
    torch.empty(2**20, device="cuda")
    """
    rehearse(script, "--devices", "2", status=0)


HAND_MADE_PIPELINE = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    layer = torch.nn.Linear(1024, 1024 * (1 + 3 * rank), device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        x = torch.empty(512, 1024, device="cuda")
        if rank:
            dist.recv(x, rank - 1)
        out = layer(x)
        if rank + 1 < dist.get_world_size():
            dist.send(out.detach(), rank + 1)
        out.sum().backward()
        optimizer.step()
"""


def test_ranks_that_send_messages_are_rehearsed_together(rehearse: Rehearse) -> None:
    answer = rehearse(HAND_MADE_PIPELINE, "--ranks", "2", status=0)
    assert answer.found["rank"] == 1
    assert len(answer.found["rank_peaks"]) == 2


def test_messages_between_too_many_ranks_give_no_answer(rehearse: Rehearse) -> None:
    answer = rehearse(HAND_MADE_PIPELINE, "--ranks", "32", json_format=False, status=2)
    assert "--together" in answer.printed


if __name__ == "__main__":
    print("| script | exact, MiB | rehearsed, MiB | verdict | named lines | CPU s |\n|---|---|---|---|---|---|")
    for each in sys.argv[1:] or sorted(SOURCES):
        print_row(each)
