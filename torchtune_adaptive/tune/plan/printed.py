"""A prediction as text, and as rows of figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_adaptive.prediction.answer import MOST_ROWS, Answer, Prediction
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.sizes import format_apart, format_bytes
from torchtune_adaptive.wording import count_of


def table(answer: Answer) -> str:
    """Predictions for the rows that matter, with what they mean."""
    lines = ["  rows   allocated   reserved    bound by"]
    lines += [_line(prediction, answer) for prediction in answer.predictions()]
    return "\n".join(lines)


def stages(answers: Mapping[str, Answer]) -> str:
    """What fits in each of several stages, a line each: the rows to run, and how many would fit."""
    lines = [f"  {'stage':<28}rows   fit       allocated   reserved    of budget   bound by"]
    return "\n".join([*lines, *(_stage_line(name, answer) for name, answer in answers.items())])


def _stage_line(name: str, answer: Answer) -> str:
    rows = answer.chosen_rows or 1
    prediction, have = answer.predict(rows), answer.budget.usable_bytes
    most = f"{MOST_ROWS}+" if answer.most_rows == MOST_ROWS else str(answer.most_rows)
    sizes = f"{format_bytes(prediction.peak.peak_bytes or 0):<12}{format_bytes(prediction.reserved_bytes):<12}"
    share = f"{100 * prediction.reserved_bytes / have:5.0f} %     "
    fits = prediction.phase if answer.chosen_rows else "one row does not fit"
    return f"  {name:<28}{rows:<7}{most:<10}{sizes}{share}{fits}"


def choice(answer: Answer, key: str = "batch_size") -> str:
    """The batch size to train with, or the rows of one of several stages; or what to do where there is none."""
    if not answer.chosen_rows:
        return (
            "one row does not fit: lower sequence_length, set enable_activation_checkpointing: True, "
            "or train on more ranks"
        )
    if answer.chosen_rows == answer.most_rows:
        return f"{key}: {answer.chosen_rows}"
    return f"{key}: {answer.chosen_rows} ({answer.most_rows} fit, rounded down as adaptive.round_to says)"


def shortfall(answer: Answer) -> str:
    """How much memory is missing for even one row."""
    need, have = format_apart(answer.reserved_bytes(1), answer.budget.usable_bytes)
    return f"does not fit in {have}: one row of {answer.tokens} tokens needs {need}"


def what_fits(outcomes: Sequence[Outcome], ranks: int) -> str:
    """Changes after which a step fits, a line each; what stands in front of a line is given as it is."""
    if not outcomes:
        return "  nothing that was tried fits: lower sequence_length, or take a larger card"
    names = [name_of(each, ranks) for each in outcomes]
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}}   {_costs(each)}" for name, each in zip(names, outcomes, strict=True))


def speeds(outcomes: Sequence[Outcome], ranks: int) -> str:
    """Settings by their speed, with the range in which it is expected."""
    lines = ["  tokens/s   between           rows   reserved    with"]
    for each in outcomes:
        slow, fast = each.range_of_tokens_per_s
        speed = f"{each.tokens_per_s:<11.0f}{f'{slow:.0f} and {fast:.0f}':<18}{each.rows:<7}"
        need = format_bytes(each.peak_bytes)
        cells = speed if each.fits else f"{'does not fit':<36}"
        lines.append(f"  {cells}{need:<12}{name_of(each, ranks)}")
    return "\n".join(lines)


def by_ranks(outcomes: Sequence[Outcome]) -> str:
    """One config on several numbers of ranks."""
    lines = ["  ranks   tokens   rows   reserved    tokens/s   between"]
    for each in outcomes:
        slow, fast = each.range_of_tokens_per_s
        size = f"{each.ranks:<8}{each.tokens:<9}{each.rows or '-':<7}{format_bytes(each.peak_bytes):<12}"
        speed = f"{each.tokens_per_s:<11.0f}{slow:.0f} and {fast:.0f}" if each.fits else "does not fit"
        lines.append(f"  {size}{speed}")
    return "\n".join(lines)


def alternatives(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Alternatives for programs."""
    return [
        {
            "overrides": each.name,
            "ranks": each.ranks,
            "tokens": each.tokens,
            "rows": each.rows,
            "fits": each.fits,
            "reserved_bytes": each.peak_bytes,
            "tokens_per_s": each.tokens_per_s,
            "tokens_per_s_between": each.range_of_tokens_per_s,
            "slowdown": each.slowdown,
        }
        for each in outcomes
    ]


def name_of(outcome: Outcome, ranks: int) -> str:
    """What to append, and on how many ranks where it is on more."""
    name = outcome.name or "as it is"
    return name if outcome.ranks == ranks else f"{name}, on {count_of(outcome.ranks, 'rank')}"


def _costs(outcome: Outcome) -> str:
    fits = f"fits {count_of(outcome.rows, 'row')}"
    return fits if outcome.slowdown is None else f"{fits:<13} about {outcome.slowdown:.2f} × the time of a step"


def figures(answer: Answer) -> list[dict[str, Any]]:
    """Figures for programs, in bytes."""
    return [
        {
            "tokens": answer.tokens,
            "rows": prediction.rows,
            "allocated_bytes": prediction.peak.peak_bytes,
            "reserved_bytes": prediction.reserved_bytes,
            "usable_bytes": answer.budget.usable_bytes,
            "bound_by": prediction.phase,
            "fits": prediction.fits,
            "allocator_retries": prediction.retries,
            "chosen": prediction.rows == answer.chosen_rows,
        }
        for prediction in answer.predictions()
    ]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_json(rows: Sequence[dict[str, Any]], notes: Sequence[str], **beside: object) -> str:
    """`beside`: what else the answer says, where it says anything."""
    said = {name: value for name, value in beside.items() if value not in ([], None)}
    return json.dumps({"predictions": list(rows), **said, "notes": list(notes)}, indent=2)


def _line(prediction: Prediction, answer: Answer) -> str:
    allocated = format_bytes(prediction.peak.peak_bytes or 0)
    reserved = format_bytes(prediction.reserved_bytes)
    cells = f"  {prediction.rows:<6} {allocated:<12}{reserved:<12}{prediction.phase:<18}"
    return f"{cells}{_remark(prediction, answer)}".rstrip()


def _remark(prediction: Prediction, answer: Answer) -> str:
    if not prediction.fits:
        return "does not fit"
    if prediction.rows == MOST_ROWS:
        return f"<- at least {MOST_ROWS} rows fit, the search stops here"
    if prediction.rows == answer.most_rows:
        return "<- most without allocator retries"
    if prediction.rows > answer.most_rows:
        return "fits only by flushing the cache (slow)"
    return ""
