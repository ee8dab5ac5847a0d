"""What a run that was asked to end has to have said and saved."""

import re
from collections.abc import Iterator

from tests.recipes.crash.points import TIME, Point
from tests.recipes.crash.victims import Life

TOLD = re.compile(
    r"(SIG\w+)((?: on rank \d)?): stopped (.*); (nothing is saved|last checkpoint: \S+)\. "
    r"To (?:resume|restart): (.*)$",
    re.M,
)
AFTER_STEP = re.compile(r"after step (\d+)")
AT_ONCE = "ended immediately"


def faults_of_a_stop(point: Point, life: Life, trained: int | None, saved: int) -> Iterator[str]:
    """What is not as it should be. It has `trained` as far as to this step, if any, and `saved` is the newest
    checkpoint's; nobody hears a signal that comes while Python still imports."""
    told = TOLD.findall(life.output)
    if not told and point.stage == TIME and trained is None:
        return
    if trained is not None and saved != trained:
        yield f"step {trained} was trained, and last checkpoint: step {saved}"
    if len(told) != 1:
        yield f"it says {len(told)} times what is saved"
        return
    [(name, on_rank, where, what, command)] = told
    if not point.launcher and (name, on_rank) != (f"SIG{point.blow}", f" on rank {point.rank}" * (point.rank > 0)):
        yield f"it says that it was {name}{on_rank}"
    named = AFTER_STEP.search(where)
    if named and int(named[1]) != trained:
        yield f"it says {where!r}, and the last step was {trained}"
    if not named and trained is not None:
        yield f"it says {where!r} after step {trained}"
    if (what == "nothing is saved") != (saved == 0):
        yield f"it says {what!r}, and the newest checkpoint is of step {saved}"
    if "resume_from_checkpoint=auto" not in command:
        yield f"it says to go on with {command!r}"
    if AT_ONCE in life.output:
        yield "one signal was taken for two"
    if not life.cleanly and not point.launcher:
        yield "a signal to a rank is no failure, and the status is not 0"
