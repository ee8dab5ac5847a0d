"""A prediction as text, and as rows of figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torchtune_adaptive.memory_sizes import format_apart, format_bytes
from torchtune_adaptive.prediction.capacity import MOST_ROWS, Capacity, Prediction
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.tune.plan.asked_token_budget import TokenBudget
from torchtune_adaptive.tune.plan.capacities import Capacities
from torchtune_adaptive.wording import count_of, in_columns


def table(capacity: Capacity) -> str:
    """Predictions for the rows that matter, with what they mean."""
    heading = ("rows", "allocated", "reserved", "bound by", "")
    return in_columns([heading, *(_cells(prediction, capacity) for prediction in capacity.predictions())])


def stages(capacities: Mapping[str, Capacity]) -> str:
    """What fits in each of several stages, a line each: the rows to run, and how many would fit."""
    heading = ("stage", "rows", "fit", "allocated", "reserved", "of budget", "bound by")
    return in_columns([heading, *(_cells_of_stage(name, capacity) for name, capacity in capacities.items())])


def _cells_of_stage(name: str, capacity: Capacity) -> tuple[str, ...]:
    prediction = capacity.predict(capacity.chosen_rows or 1)
    bound_by = prediction.phase
    if not capacity.chosen_rows:
        bound_by = "fits only by flushing the cache (slow)" if capacity.fits_by_flushing else "one row does not fit"
    return (
        name,
        str(capacity.chosen_rows or "-"),
        f"{MOST_ROWS}+" if capacity.most_rows == MOST_ROWS else str(capacity.most_rows),
        format_bytes(prediction.peak.peak_bytes or 0),
        format_bytes(prediction.reserved_bytes),
        f"{100 * prediction.reserved_bytes / capacity.budget.usable_bytes:5.0f} %",
        bound_by,
    )


def choice(capacity: Capacity, key: str = "batch_size", at_most: int | None = None) -> str:
    """The batch size to train with, or the rows of one of several stages, where at least one fits. `at_most` is
    `adaptive.max_batch_size`."""
    if capacity.chosen_rows == capacity.most_rows:
        return f"{key}: {capacity.chosen_rows}"
    why = "rounded down by adaptive.round_to"
    if capacity.passed_over is not None:
        why = f"but not {capacity.passed_over}, which fragment the cache"
    elif at_most is not None and at_most < capacity.most_rows:
        why = f"adaptive.max_batch_size is {at_most}"
    return f"{key}: {capacity.chosen_rows} ({capacity.most_rows} fit, {why})"


def choice_of_tokens(capacity: Capacity, row_tokens: int, budget: TokenBudget, stage: str = "") -> str:
    """The token budget to train with, where at least one row fits, which has so many tokens."""
    key, where = "adaptive.token_budget", f" in {stage}" if stage else ""
    most = capacity.most_rows * row_tokens
    rows = f"{count_of(capacity.most_rows, 'row')} of {row_tokens} tokens"
    if not isinstance(budget.asked, int):
        return f"{key}: {most} fit{where} ({rows}); auto measures it on the device"
    if budget.asked < row_tokens:
        return f"{key}: {budget.asked} has no room for a row of {row_tokens} tokens{where}; {most} fit ({rows})"
    fits = "fits" if budget.fits(capacity, row_tokens) else "does not fit"
    return f"{key}: {budget.asked} {fits}{where}; the most is {most} ({rows})"


def shortfall(capacity: Capacity) -> str:
    """What is missing for even one row."""
    need, have = format_apart(capacity.reserved_bytes(1), capacity.budget.usable_bytes)
    row = f"one row of {capacity.tokens} tokens"
    if capacity.fits_by_flushing:
        return f"{row} fits in {have} only by flushing the cache, which is slow: without that it needs {need}"
    return f"does not fit in {have}: {row} needs {need}"


def no_row(capacity: Capacity, ways_out: Sequence[str]) -> str:
    """A line for where not even one row fits, with what to do about it."""
    fact = shortfall(capacity) if capacity.fits_by_flushing else "one row does not fit"
    *others, last = ways_out
    return f"{fact}: {', '.join(others)}, or {last}"


def checked(largest_error: float) -> str:
    return f"checked against a directly traced step: {100 * largest_error:+.2f} %"


def fitting(outcomes: Sequence[Outcome], ranks: int) -> str:
    """Changes after which a step fits, a line each."""
    if not outcomes:
        fact = "nothing that was tried fits, not even on 8 times as many ranks"
        return f"  {fact}: lower sequence_length, or use a larger card"
    lines = []
    for each in outcomes:
        time = "" if each.slowdown is None else f"about {each.slowdown:.2f} × the step time"
        lines.append((name_of(each, ranks), f"fits {count_of(each.rows, 'row')}", time))
    return in_columns(lines)


def speeds(outcomes: Sequence[Outcome], ranks: int) -> str:
    """Settings by their speed, with the range in which it is expected."""
    lines = [("tokens/s", "between", "rows", "reserved", "with")]
    for each in outcomes:
        lines.append((*_speed(each), str(each.rows or "-"), format_bytes(each.peak_bytes), name_of(each, ranks)))
    return in_columns(lines)


def by_ranks(outcomes: Sequence[Outcome]) -> str:
    """One config on several numbers of ranks; of a step of several stages, a line for each."""
    staged = any(each.name for each in outcomes)
    lines: list[Sequence[object]] = [
        ("ranks", "tokens", *["stage"] * staged, "rows", "reserved", "tokens/s", "between")
    ]
    for each in outcomes:
        size = each.rows or "-", format_bytes(each.peak_bytes)
        lines.append((each.ranks, each.tokens, *[each.name] * staged, *size, *_speed(each)))
    return in_columns(lines)


def _speed(outcome: Outcome) -> tuple[str, str]:
    """Tokens a second, and the range in which they are expected."""
    if outcome.seconds is None or not outcome.fits:
        return "unknown" if outcome.fits else "does not fit", ""
    slow, fast = outcome.range_of_tokens_per_s
    return f"{outcome.tokens_per_s:.0f}", f"{slow:.0f} and {fast:.0f}"


def alternatives(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Alternatives for programs."""
    return [
        {
            "overrides": each.name,
            "ranks": each.ranks,
            "tokens": each.tokens,
            "rows": each.rows,
            "fits": each.fits,
            "reserved_bytes": each.peak_bytes,
            "tokens_per_s": each.tokens_per_s if each.seconds and each.fits else None,
            "tokens_per_s_between": each.range_of_tokens_per_s if each.seconds and each.fits else None,
            "slowdown": each.slowdown,
        }
        for each in outcomes
    ]


def name_of(outcome: Outcome, ranks: int) -> str:
    """What to append, and on how many ranks where it is on more."""
    name = outcome.name or "as it is"
    return name if outcome.ranks == ranks else f"{name}  (on {count_of(outcome.ranks, 'rank')})"


def figures(capacity: Capacity) -> list[dict[str, object]]:
    """Figures for programs, in bytes."""
    return [
        {
            "tokens": capacity.tokens,
            "rows": prediction.rows,
            "allocated_bytes": prediction.peak.peak_bytes,
            "reserved_bytes": prediction.reserved_bytes,
            "usable_bytes": capacity.budget.usable_bytes,
            "bound_by": prediction.phase,
            "fits": prediction.fits,
            "allocator_retries": prediction.retries,
            "chosen": prediction.rows == capacity.chosen_rows,
        }
        for prediction in capacity.predictions()
    ]


def by_ranks_for_programs(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Outcomes of one config, a row for each number of ranks, length and stage."""
    rows = alternatives(outcomes)
    return [{"stage": row.pop("overrides")} | row for row in rows]


def budgets(found: Capacities) -> list[dict[str, object]]:
    """What a token budget comes to at each length and in each stage, for programs."""
    return [
        {
            **({"stage": stage} if stage else {}),
            "tokens": capacity.tokens,
            "token_budget": budget.asked,
            "fits": found.budget_fits(stage, at),
            "most_tokens": capacity.most_rows * found.row_tokens(stage, at),
        }
        for stage, budget in found.token_budgets.items()
        for at, capacity in enumerate(found.by_stage[stage])
    ]


def as_json(rows: Sequence[dict[str, object]], notes: Sequence[str], **beside: object) -> str:
    """`beside`: what else the answer says, where it says anything."""
    said = {name: value for name, value in beside.items() if value not in ([], None)}
    return json.dumps({"predictions": list(rows), **said, "notes": list(notes)}, indent=2)


def _cells(prediction: Prediction, capacity: Capacity) -> tuple[str, ...]:
    allocated, reserved = format_bytes(prediction.peak.peak_bytes or 0), format_bytes(prediction.reserved_bytes)
    return str(prediction.rows), allocated, reserved, prediction.phase, _remark(prediction, capacity)


def _remark(prediction: Prediction, capacity: Capacity) -> str:
    if not prediction.fits:
        return "does not fit"
    if prediction.retries:
        return "fits only by flushing the cache (slow)"
    if prediction.rows == MOST_ROWS:
        return f"<- at least {MOST_ROWS} rows fit, the search stops here"
    if prediction.rows == capacity.most_rows:
        return "<- most without allocator retries"
    return ""
