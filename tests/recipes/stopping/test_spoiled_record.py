"""A run whose record cannot be written, or holds what nobody can read, trains to its end and says so once."""

from pathlib import Path

from tests.pictures import is_drawn
from tests.ranks import run_on_ranks
from tests.recipes.finetuning.test_adaptive_runs import run_and_listen
from tests.recipes.recording import read_log
from torchtune_adaptive.report.journal import EVENTS_FILE, STEPS_FILE

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


def nothing_can_be_read(out: Path) -> None:
    out.mkdir(parents=True)
    lines = b"null\n[1]\n{}\n" + b"[" * 100_000 + b'\n{"time": 1, "step": 1, "kind": ["start"]}\n{"step": 3, "ki\xff'
    for name in (STEPS_FILE, EVENTS_FILE, "batch_search.json"):
        (out / name).write_bytes(lines)


def train(kind: str, folder: Path) -> list[str]:
    """Collective: a whole run; what it said."""
    return run_and_listen(kind, folder, *SEARCHING)


def test_a_run_that_cannot_write_its_record_trains_to_its_end_and_says_each_thing_once(tmp_path: Path) -> None:
    only_steps_can_be_written(out := tmp_path / "run" / "out")
    said, elsewhere = run_on_ranks(2, train, "full", tmp_path / "run", timeout_s=120, in_group=False)
    assert [step["step"] for step in read_log(tmp_path / "run" / "log.jsonl")] == list(range(1, STEPS + 1))
    assert [line for line in said if "the record of this run" in line] == [
        f"the record of this run is incomplete: {out / EVENTS_FILE}: No space left on device; training continues"
    ]
    for name in ("adaptive_report.png", "batch_search.png"):
        assert [line for line in said if name in line] == [f"{name} is not drawn: Is a directory"]
    assert sum("batch_search.json (Is a directory): " in line for line in said) == 1
    assert sum("searching again" in line for line in said) == 1
    assert elsewhere == []


def test_a_run_whose_record_cannot_be_read_searches_again_goes_on_and_is_drawn(tmp_path: Path) -> None:
    nothing_can_be_read(out := tmp_path / "run" / "out")
    said, elsewhere = run_on_ranks(2, train, "full", tmp_path / "run", timeout_s=120, in_group=False)
    assert sum("searching again" in line for line in said) == 1
    assert [line for line in said if "are skipped" in line] == [
        f"{out / STEPS_FILE}: 6 of 11 lines cannot be read and are skipped",
        f"{out / EVENTS_FILE}: 6 of 9 lines cannot be read and are skipped",
    ]
    assert is_drawn(out / "adaptive_report.png")
    assert elsewhere == []
