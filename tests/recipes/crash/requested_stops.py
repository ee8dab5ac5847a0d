"""Check the output and the checkpoint of a run that received a signal."""

import re
from collections.abc import Iterator

from tests.recipes.crash.child_runs import Life
from tests.recipes.crash.kill_points import TIME, Point

TOLD = re.compile(
    r"(SIG\w+)((?: on rank \d)?): stopped (.*); (nothing is saved|last checkpoint: \S+)\. "
    r"To (?:resume|restart): (.*)$",
    re.M,
)
AFTER_STEP = re.compile(r"after step (\d+)")
AT_ONCE = "ended immediately"


def faults_of_a_stop(point: Point, life: Life, trained: int | None, saved: int) -> Iterator[str]:
    """Yield errors in the stop of a run that trained to step `trained`, if any, and whose newest checkpoint is step
    `saved`. Signals that arrive while Python still imports are lost.
    """
    message = TOLD.findall(life.output)
    if not message and point.stage == TIME and trained is None:
        return
    if trained is not None and saved != trained:
        yield f"step {trained} was trained, but the newest checkpoint is of step {saved}"
    if len(message) != 1:
        yield f"the last checkpoint was printed {len(message)} times"
        return
    [(name, on_rank, where, what, command)] = message
    if not point.launcher and (name, on_rank) != (f"SIG{point.blow}", f" on rank {point.rank}" * (point.rank > 0)):
        yield f"printed signal: {name}{on_rank}"
    named = AFTER_STEP.search(where)
    if named and int(named[1]) != trained:
        yield f"printed {where!r}, but the last step was {trained}"
    if not named and trained is not None:
        yield f"printed {where!r} after step {trained}"
    if (what == "nothing is saved") != (saved == 0):
        yield f"printed {what!r}, but the newest checkpoint is of step {saved}"
    if "resume_from_checkpoint=auto" not in command:
        yield f"printed command: {command!r}"
    if AT_ONCE in life.output:
        yield "one signal was taken for two"
    if not life.cleanly and not point.launcher:
        yield "a signal to a rank is no failure, and the status is not 0"
