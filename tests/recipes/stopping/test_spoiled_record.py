"""A run whose record cannot be written trains to its end and says so once."""

from pathlib import Path

from tests.ranks import run_on_ranks
from tests.recipes.finetuning.test_adaptive_runs import run_and_listen
from tests.recipes.recording import read_log
from torchtune_adaptive.report.journal import EVENTS_FILE

SEARCHING = (
    "use_maximum_batch_size=True",
    "adaptive.memory_limit=64MiB",
    "adaptive.sequence_length=null",
    "tokenizer.max_seq_len=null",
    "adaptive.max_batch_size=2",
)
STEPS = 4


def only_steps_can_be_written(out: Path) -> None:
    """So that there is something to draw."""
    out.mkdir(parents=True)
    (out / EVENTS_FILE).symlink_to("/dev/full")
    for name in ("adaptive_report.png", "batch_search.json", "batch_search.png"):
        (out / name).mkdir()


def test_a_run_that_cannot_write_its_record_trains_to_its_end_and_says_each_thing_once(tmp_path: Path) -> None:
    only_steps_can_be_written(out := tmp_path / "run" / "out")
    said, elsewhere = run_on_ranks(
        2, run_and_listen, "full", tmp_path / "run", *SEARCHING, timeout_s=120, in_group=False
    )
    assert [step["step"] for step in read_log(tmp_path / "run" / "log.jsonl")] == list(range(1, STEPS + 1))
    assert [line for line in said if "the record of this run" in line] == [
        f"the record of this run is incomplete: {out / EVENTS_FILE}: No space left on device; training continues"
    ]
    for name in ("adaptive_report.png", "batch_search.png"):
        assert [line for line in said if name in line] == [f"{name} is not drawn: Is a directory"]
    assert sum("batch_search.json (Is a directory): " in line for line in said) == 1
    assert sum("searching again" in line for line in said) == 1
    assert elsewhere == []
