"""`--snapshot`: a file that torch reads, and a picture of a step by category."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rehearse.conftest import Rehearse
from tests.rehearse.test_rehearse import SHARDED, TRAINS, WEIGHTS
from tests.saved_figures import is_drawn
from torchtune_adaptive.null_cuda import environment

OPTIONS = "--memory", "6GiB", "--memory-overhead", "0", "--snapshot", "memory.pickle"


def highest(snapshot: Any) -> int:
    """Return the peak of allocated memory, from the events. Their sizes are not rounded to the allocator's blocks."""
    held, most = 0, 0
    for event in snapshot["device_traces"][0]:
        held += {"alloc": event["size"], "free_requested": -event["size"]}.get(event["action"], 0)
        most = max(most, held)
    return most


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Any]:
    return lambda name="memory.pickle": pickle.loads((tmp_path / name).read_bytes())


def at_peak(timeline: Any) -> dict[str, int]:
    return {name: held[timeline["peak"]] for name, held in timeline["held_bytes"].items()}


@pytest.mark.smoke
def test_torch_reads_the_snapshot_and_the_step_with_the_highest_peak_is_divided_by_category(
    rehearse: Rehearse, tmp_path: Path, read: Callable[..., Any]
) -> None:
    from torch.cuda import _memory_viz

    answer = rehearse(TRAINS, *OPTIONS, command=("train.py", "100", "20000", "200"))
    assert answer.status == 0, answer.printed
    snapshot, peak = read(), pytest.approx(answer.found["steps"][1]["allocated_bytes"], rel=1e-5)
    assert highest(snapshot) == peak
    lines = {frame["line"] for event in snapshot["device_traces"][0] for frame in event["frames"]
             if frame["filename"].endswith("train.py")}  # fmt: skip
    assert {4, 8, 10} <= lines  # model, forward, update
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State" in _memory_viz.segment_plot(snapshot)
    assert "GiB" in _memory_viz.segsum(snapshot)
    timeline, held = snapshot["timeline"], at_peak(snapshot["timeline"])
    assert (timeline["step"], timeline["requested_bytes"], sum(held.values())) == ("step 2", 0, peak)
    assert (held["parameters"], held["optimizer"]) == (WEIGHTS, 2 * WEIGHTS)
    assert held["activations and other"] >= 4 * 20000 * 4096 * 4
    assert held["backward pass"] >= 20000 * 4096 * 4
    assert max(timeline["held_bytes"]["gradients"]) == WEIGHTS
    assert list(dict.fromkeys(timeline["phases"])) == ["forward", "backward", "update"]
    assert timeline["place"].endswith("train.py:9: loss.backward()")
    assert is_drawn(tmp_path / "memory.pickle.png")


def test_snapshot_of_an_out_of_memory_error_has_the_failed_step(
    rehearse: Rehearse, tmp_path: Path, read: Callable[..., Any]
) -> None:
    answer = rehearse(TRAINS, *OPTIONS, command=("train.py", "100", "90000"))
    snapshot, error = read(), answer.found["out_of_memory"]
    failed = [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "oom"]
    asked, allocated = error["asked_bytes"], error["allocated_bytes"]
    blocks = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
              if block["state"] == "active_allocated"]  # fmt: skip
    assert (answer.status, failed, sum(blocks)) == (1, [90000 * 4096 * 4], allocated)
    timeline = snapshot["timeline"]
    assert (timeline["step"], timeline["requested_bytes"]) == ("step 2", pytest.approx(asked, rel=0.01))
    assert sum(at_peak(timeline).values()) == pytest.approx(allocated, rel=1e-5)
    assert timeline["place"] == f"{error['file']}:{error['line']}: {error['source']}"
    assert is_drawn(tmp_path / "memory.pickle.png")


def test_gathered_parameters_are_communication(rehearse: Rehearse, read: Callable[..., Any]) -> None:
    answer = rehearse(SHARDED, "--ranks", "4", "--snapshot", "memory.pickle", command=("train.py", "8"))
    assert answer.status == 0, answer.printed
    held, layer = read()["timeline"]["held_bytes"], 8192 * 8192 * 4
    assert max(held["parameters"]) == 4 * layer // 4
    assert layer <= max(held["communication"]) <= 4 * layer
    assert max(held["activations and other"]) < layer // 4


def test_each_rank_of_a_real_run_saves_its_snapshot(rehearse: Rehearse, read: Callable[..., Any]) -> None:
    command = ("torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "100")
    variables = environment(memory="4GiB")
    answer = rehearse(TRAINS, "--real", "--snapshot", "memory.pickle", command=command, variables=variables)
    assert answer.status == 0, answer.printed
    peaks = [pytest.approx(each["allocated_bytes"], rel=1e-3) for each in answer.found["rank_peaks"]]
    assert [highest(read(f"memory_{rank}.pickle")) for rank in range(2)] == peaks
