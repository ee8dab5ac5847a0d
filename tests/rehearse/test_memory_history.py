"""`--snapshot`: a file that torch reads."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rehearse.conftest import Rehearse
from tests.rehearse.test_rehearse import TRAINS

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


@pytest.mark.smoke
def test_torch_reads_the_snapshot(rehearse: Rehearse, read: Callable[..., Any]) -> None:
    from torch.cuda import _memory_viz

    answer = rehearse(TRAINS, *OPTIONS, command=("train.py", "100", "20000", "200"))
    assert answer.status == 0, answer.printed
    snapshot, peak = read(), pytest.approx(answer.found["steps"][1]["allocated_bytes"], rel=1e-5)
    assert highest(snapshot) == peak
    events = snapshot["device_traces"][0]
    lines = {frame["line"] for event in events for frame in event["frames"] if frame["filename"].endswith("train.py")}
    assert {4, 8, 10} <= lines  # model, forward, update
    assert {"step 1", "step 2", "step 3"} <= {event["user_metadata"] for event in events}
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State" in _memory_viz.segment_plot(snapshot)
    assert "GiB" in _memory_viz.segsum(snapshot)


def test_snapshot_of_an_out_of_memory_error_has_the_failed_step(rehearse: Rehearse, read: Callable[..., Any]) -> None:
    answer = rehearse(TRAINS, *OPTIONS, command=("train.py", "100", "90000"))
    snapshot, allocated = read(), answer.found["out_of_memory"]["allocated_bytes"]
    failed = [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "oom"]
    blocks = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
              if block["state"] == "active_allocated"]  # fmt: skip
    assert (answer.status, failed, sum(blocks)) == (1, [90000 * 4096 * 4], allocated)


def test_each_rank_that_runs_saves_its_snapshot(rehearse: Rehearse, read: Callable[..., Any]) -> None:
    command = ("torchrun", "--nproc_per_node", "2", "train.py", "100")
    answer = rehearse(TRAINS, "--together", "--snapshot", "memory.pickle", command=command)
    assert answer.status == 0, answer.printed
    peaks = [pytest.approx(each["allocated_bytes"], rel=1e-3) for each in answer.found["rank_peaks"]]
    assert [highest(read(f"memory_{rank}.pickle")) for rank in range(2)] == peaks
