"""A step's laws, from as few traces of it as it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtune_adaptive.errors import OneRowDoesNotFitError, PredictionError
from torchtune_adaptive.memory_sizes import format_bytes
from torchtune_adaptive.prediction.law import MemoryLaw, fit_law, grows_faster_than_tokens, peak_of, sizes_of
from torchtune_adaptive.prediction.recorder import Recording
from torchtune_adaptive.prediction.roofline import WorkLaw, fit_work
from torchtune_adaptive.tune.trace.fakes import FakeStep

TRACED_ROWS = (2, 3)
"""One row is cut into chunks in another way than several."""
LONGEST_TRACED = 2048
TRACED_MULTIPLE = 128
"""Kernels round lengths up to this; lengths between are rounded by less than the check allows."""
COMPILED_ROWS = 8
"""Before it is known how many fit: what is compiled for many tokens keeps and orders things as for more of them."""

Traced = Callable[[], None]


@dataclass(frozen=True)
class OneRow:
    """The least that has to fit for an answer to be of use."""

    tokens: int
    usable_bytes: int

    def check(self, need_bytes: int, rows: int = 0, tokens: int = 0) -> None:
        """Raises OneRowDoesNotFitError where no more than this row needs more than there is."""
        if rows * tokens <= self.tokens and need_bytes > self.usable_bytes:
            raise OneRowDoesNotFitError(
                f"one row of {self.tokens} tokens needs {format_bytes(need_bytes)} or more, but only "
                f"{format_bytes(self.usable_bytes)} are usable",
                need_bytes=need_bytes,
                budget_bytes=self.usable_bytes,
            )


def law_of(step: FakeStep, tokens: int, traced: Traced, rows: int = COMPILED_ROWS) -> MemoryLaw:
    """What the step allocates for any size; `traced` is called after each of its four traces, or six.

    What is compiled is compiled for so many rows and tokens.
    """
    return laws_of(step, tokens, traced, rows, counting=False)[0]


def laws_of(
    step: FakeStep,
    tokens: int,
    traced: Traced,
    rows: int = COMPILED_ROWS,
    *,
    counting: bool = True,
    one_row: OneRow | None = None,
) -> tuple[MemoryLaw, WorkLaw | None]:
    """Laws of a step's memory, and what its kernels do; where `one_row` does not fit, as few traces as show that."""
    if one_row is not None:
        one_row.check(step.least_bytes)
    if step.settings.compile:
        step.compile_for(rows, tokens)
    recordings = _recordings(step, traced, counting, one_row)
    works = {size: recording.work for size, recording in recordings.items() if recording.work is not None}
    law = fit_law(recordings, tokens_multiple=step.tokens_multiple, caches=step.on_gpu)
    return law, fit_work(works, tokens_multiple=step.tokens_multiple) if works else None


def _recordings(
    step: FakeStep, traced: Traced, counting: bool, one_row: OneRow | None
) -> dict[tuple[int, int], Recording]:
    """Two numbers of rows at two lengths, or three; the longest, which may show that one row does not fit, first."""
    longest = _traced_length(step, step.tokens_multiple)

    def at(tokens: int) -> dict[tuple[int, int], Recording]:
        found = {}
        for rows in TRACED_ROWS:
            found[rows, tokens] = recording = step.record(rows, tokens, counting=counting)
            traced()
            if one_row is not None:
                peak = peak_of(recording.phases, sizes_of(recording), caches=step.on_gpu)
                one_row.check(peak.peak_bytes or 0, rows, tokens)
        return found

    of_long = at(longest)
    recordings = at(longest // 2) | of_long
    return recordings | at(3 * longest // 4) if grows_faster_than_tokens(recordings) else recordings


def _traced_length(step: FakeStep, multiple: int) -> int:
    allowed = step.most_tokens(LONGEST_TRACED)
    for rounding in (4 * TRACED_MULTIPLE, 4 * multiple):
        if length := min(LONGEST_TRACED, allowed) // rounding * rounding:
            return int(length)
    raise PredictionError(
        f"model takes at most {allowed} tokens (its max_seq_len), too few to predict how memory grows: "
        f"at least {4 * multiple} are needed"
    )
