"""What the limit has come to is in the checkpoint: a resumed run does not run out of memory to learn it again."""

from contextlib import nullcontext
from pathlib import Path

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import demo_config, run_ours
from tests.recipes.stops import stopped_before, to_resume
from torchtune_adaptive.report.journal import read_timeline

LIMITED = (
    "batch_size=8",
    "gradient_accumulation_steps=1",
    "epochs=2",
    "adaptive.memory_limit=40MiB",
    "use_maximum_batch_size=True",
    "adaptive.max_batch_size=8",
    "adaptive.sequence_length=64",  # of a worst case that is none
)
STEPS = 4  # of an epoch


def train(folder: Path, resume: bool) -> None:
    """Collective: the first epoch, or the second of the run that is there."""
    how = to_resume("full", 1) if resume else []
    with nullcontext() if resume else stopped_before(1):
        run_ours("full", demo_config("full", folder, *LIMITED, *how))


def test_a_resumed_run_begins_under_the_limit_that_the_first_had_come_to(tmp_path: Path) -> None:
    for resume in (False, True):
        run_on_ranks(2, train, tmp_path / "run", resume, timeout_s=120, in_group=False)
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert [step["step"] for step in log] == list(range(1, 2 * STEPS + 1))
    last, first = log[STEPS - 1], log[STEPS]
    assert last["oom_recoveries"] >= 1
    assert first["microbatch_rows"] == last["microbatch_rows"] < 8
    assert first["oom_recoveries"] == last["oom_recoveries"]
    timeline = read_timeline(tmp_path / "run" / "out")
    assert [record["step"] for record in timeline.steps] == [step["step"] for step in log]
    assert [event["step"] for event in timeline.events if event["kind"] == "start"] == [0, STEPS]
    searched, again = (event for event in timeline.events if event["kind"] == "search")
    assert (searched["step"], again["step"]) == (0, STEPS)
    assert again["reason"] == f"{searched['reason']}, reused from an earlier run"
