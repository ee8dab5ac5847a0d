"""A prediction as text, and as rows of figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from torchtune_adaptive.prediction.answer import MOST_ROWS, Answer, Prediction
from torchtune_adaptive.sizes import format_bytes


def table(answer: Answer) -> str:
    """Predictions for the rows that matter, with what they mean."""
    lines = ["  rows   allocated   reserved    bound by"]
    lines += [_line(prediction, answer) for prediction in answer.predictions()]
    return "\n".join(lines)


def choice(answer: Answer) -> str:
    """The batch size to train with, or what to do where there is none."""
    if not answer.chosen_rows:
        return (
            "one row does not fit: lower sequence_length, set enable_activation_checkpointing: True, "
            "or train on more ranks"
        )
    if answer.chosen_rows == answer.most_rows:
        return f"batch_size: {answer.chosen_rows}"
    return f"batch_size: {answer.chosen_rows} ({answer.most_rows} fit, rounded down as adaptive.round_to says)"


def figures(answer: Answer) -> list[dict[str, Any]]:
    """The same for programs, in bytes."""
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


def as_json(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    return json.dumps({"predictions": list(rows), "notes": list(notes)}, indent=2)


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
