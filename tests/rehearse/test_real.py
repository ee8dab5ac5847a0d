"""`--real` and `--compare` on a null device in place of the GPU, whose events are always 1 s apart."""

import pytest

from tests.rehearse.conftest import Rehearse
from torchtune_adaptive.null_cuda import environment

GIB = 2**30
TRAINS = """
    import os, sys, torch

    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = int(os.environ.get("RANK", 0))
    for rows in map(int, sys.argv[1 + rank].split(",")):
        model(torch.randn(rows, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WEIGHTS = 4 * 1024 * 1024 * 4


def gpu() -> dict[str, str]:
    """Return the environment of a process with a GPU."""
    return environment(memory="4GiB")


@pytest.mark.smoke
def test_real_run_reports_the_peaks_of_a_rehearsal_and_measured_times(rehearse: Rehearse) -> None:
    command = ("train.py", "100,50000,200")
    real = rehearse(TRAINS, "--real", command=command, variables=gpu())
    rehearsed = rehearse(TRAINS, "--memory", "4GiB", command=command)
    peaks = [[(step["allocated_bytes"], step["reserved_bytes"]) for step in each.found["steps"]]
             for each in (real, rehearsed)]  # fmt: skip
    assert (real.status, peaks[0]) == (0, peaks[1])
    assert [step["seconds"] for step in real.found["steps"]] == [None, 1.0, 1.0]
    assert real.found["usable_bytes"] + real.found["overhead_bytes"] == 4 * GIB
    printed = rehearse(TRAINS, "--real", command=command, variables=gpu(), json_format=False).found
    assert "1.00 s (measured" in printed
    assert "kernels did not run" not in printed


def test_real_oom_is_reported_with_its_place_and_the_contents_of_memory(rehearse: Rehearse) -> None:
    answer = rehearse(TRAINS, "--real", command=("train.py", "100,500000"), variables=gpu())
    error = answer.found["out_of_memory"]
    assert (answer.status, answer.found["fits"], error["step"]) == (1, False, 2)
    assert error["source"].startswith("model(torch.randn")
    assert (error["held_bytes"]["parameters"], error["held_bytes"]["optimizer"]) == (WEIGHTS, 2 * WEIGHTS)
    assert error["free_bytes"] + error["reserved_bytes"] <= 4 * GIB


def test_rank_that_runs_out_of_memory_is_reported(rehearse: Rehearse) -> None:
    command = ("torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "100,100", "100,500000")
    answer = rehearse(TRAINS, "--real", command=command, variables=gpu())
    assert (answer.status, answer.found["rank"], answer.found["ranks"]) == (1, 1, 2)
    assert [each["rank"] for each in answer.found["rank_peaks"]] == [0, 1]


def test_ranks_stop_after_the_requested_steps(rehearse: Rehearse) -> None:
    command = ("torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "100,100,100", "100,100,100")
    answer = rehearse(TRAINS, "--real", "--steps", "2", command=command, variables=gpu())
    assert (answer.status, answer.found["fits"], len(answer.found["steps"])) == (0, True, 2)


def test_comparison_has_both_results_and_the_differences_of_each_step(rehearse: Rehearse) -> None:
    command = ("train.py", "100,50000,200")
    answer = rehearse(TRAINS, "--compare", command=command, variables=gpu())
    assert (answer.status, answer.found["rehearsed"]["real"], answer.found["real"]["real"]) == (0, False, True)
    assert [row["reserved_bytes"]["difference"] for row in answer.found["differences"]] == [0.0] * 3
    printed = rehearse(TRAINS, "--compare", command=command, variables=gpu(), json_format=False).found
    assert [line.split()[:1] for line in printed.splitlines()[5:8]] == [["1"], ["2"], ["3"]]
    assert max(map(len, printed.splitlines())) <= 120


def test_real_run_without_a_gpu_is_refused(rehearse: Rehearse) -> None:
    without = {"CUDA_VISIBLE_DEVICES": ""}
    for option in "--real", "--compare":
        answer = rehearse(TRAINS, option, command=("train.py", "100"), json_format=False, variables=without)
        assert answer.status == 2
        assert answer.found.startswith("no answer: torch finds no GPU on this machine")


@pytest.mark.parametrize("options", [("--gpu", "h100"), ("--ranks", "2"), ("--memory", "4GiB")])
def test_options_that_describe_other_gpus_are_refused_with_real(options: tuple[str, ...], rehearse: Rehearse) -> None:
    answer = rehearse(TRAINS, "--real", *options, json_format=False)
    assert answer.status == 2
    assert "leave out" in answer.printed
