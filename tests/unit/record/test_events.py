"""Events for the record of a run."""

import json
from dataclasses import asdict
from pathlib import Path

from torchtune_adaptive.limits.change import RECOVERY, Change
from torchtune_adaptive.record.events import EVENTS_FILE
from torchtune_adaptive.record.journal import Journal


def test_the_record_says_all_that_is_known_of_a_change_of_the_limit(tmp_path: Path) -> None:
    change = Change(
        kind=RECOVERY,
        step=412,
        reason="step 412: out of memory on rank 3",
        unit="rows",
        before=16,
        after=8,
        ranks=(3,),
        rows=16,
        length=397,
        peak_bytes=900,
        budget_bytes=1000,
    )
    Journal(tmp_path).event(change)
    written = json.loads((tmp_path / EVENTS_FILE).read_text(encoding="utf-8"))
    known = {name: value for name, value in asdict(change).items() if value is not None}
    del written["time"]
    assert written == {**known, "ranks": [3]}
