"""Events for the record of a run."""

from dataclasses import asdict

from torchtune_adaptive.limits.change import RECOVERY, Change
from torchtune_adaptive.record.events import event_of


def test_an_event_says_all_that_is_known_of_a_change_of_the_limit() -> None:
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
    assert asdict(event_of(change)) == asdict(change)
