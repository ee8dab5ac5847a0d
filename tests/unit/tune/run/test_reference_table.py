"""The mark by which a pair is known again in the table of what the reference says."""

from __future__ import annotations

import pytest
import torch

from torchtune_adaptive.tune.parts.samples import PAIR
from torchtune_adaptive.tune.run.reference_table import mark_of

SAMPLE = {
    "chosen_input_ids": [1, 2, 3],
    "chosen_labels": [-100, 2, 3],
    "rejected_input_ids": [1, 4],
    "rejected_labels": [-100, 4],
}
WRITTEN_BEFORE = 2071754200


def test_a_table_that_was_written_before_still_holds() -> None:
    assert mark_of(SAMPLE) == WRITTEN_BEFORE


def test_tensors_have_the_mark_of_lists() -> None:
    assert mark_of({key: torch.tensor(values) for key, values in SAMPLE.items()}) == WRITTEN_BEFORE


@pytest.mark.parametrize("key", SAMPLE)
def test_every_sequence_counts(key: str) -> None:
    assert {key for fields in PAIR.sequences for key in fields[:2]} == SAMPLE.keys()
    assert mark_of({**SAMPLE, key: [*SAMPLE[key], 5]}) != WRITTEN_BEFORE
    assert mark_of({**SAMPLE, key: [*SAMPLE[key][:-1], 5]}) != WRITTEN_BEFORE
