"""The table of what the reference says: how it is read, and by what mark a pair is known again in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtune_adaptive.errors import SampleError
from torchtune_adaptive.tune.preference import KEPT
from torchtune_adaptive.tune.reference import ReferenceTable, mark_of, packed, unpacked
from torchtune_adaptive.tune.samples import PAIR

SAMPLE = {
    "chosen_input_ids": [1, 2, 3],
    "chosen_labels": [-100, 2, 3],
    "rejected_input_ids": [1, 4],
    "rejected_labels": [-100, 4],
}


def test_tensors_have_the_mark_of_lists() -> None:
    assert mark_of({key: torch.tensor(values) for key, values in SAMPLE.items()}) == mark_of(SAMPLE)


@pytest.mark.parametrize("key", SAMPLE)
def test_every_sequence_counts(key: str) -> None:
    assert {key for fields in PAIR.sequences for key in fields[:2]} == SAMPLE.keys()
    assert mark_of({**SAMPLE, key: [*SAMPLE[key], 5]}) != mark_of(SAMPLE)
    assert mark_of({**SAMPLE, key: [*SAMPLE[key][:-1], 5]}) != mark_of(SAMPLE)


PATH = Path("reference/log_probs.pt")


def table_of(*samples: dict[str, Any]) -> ReferenceTable:
    return ReferenceTable(torch.ones(len(samples), 2), torch.tensor([mark_of(sample) for sample in samples]), PATH)


def test_a_table_is_read_as_it_was_written() -> None:
    made = table_of(SAMPLE, SAMPLE)
    table = unpacked(packed(made, "these"), "these", PATH)
    assert torch.equal(table.log_probs, made.log_probs)
    assert torch.equal(table.marks, made.marks)


def another_bit(content: bytes) -> bytes:
    numbers = torch.ones(4).numpy().tobytes()
    assert content.count(numbers) == 1
    return content.replace(numbers, torch.tensor([1.0, 1.0, 1.0, 1.5]).numpy().tobytes())


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"[1]\n", lambda content: content[:-1], lambda content: content[:99], another_bit],
    ids=["empty", "JSON", "torn", "little left", "another bit"],
)
def test_a_file_that_is_no_table_is_said_to_be_damaged(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match=r"^it is damaged$"):
        unpacked(damage(packed(table_of(SAMPLE, SAMPLE), "these")), "these", PATH)


@pytest.mark.parametrize("wanted", ["others", None], ids=["others", "unknown weights"])
def test_a_table_of_other_weights_is_refused(wanted: str | None) -> None:
    for origin in ("these", None):
        with pytest.raises(ValueError, match="was made with a different"):
            unpacked(packed(table_of(SAMPLE, SAMPLE), origin), wanted, PATH)


def test_a_pair_comes_with_what_was_found_for_it() -> None:
    pair = table_of(SAMPLE).complete(0, SAMPLE)
    assert torch.equal(pair.pop(KEPT), torch.ones(2))
    assert pair == SAMPLE


def test_a_pair_that_has_changed_is_named() -> None:
    changed = {**SAMPLE, "chosen_labels": [-100, 2, 4]}
    with pytest.raises(SampleError, match=r"^sample 0 of the dataset has changed since .*log_probs.pt was written"):
        table_of(SAMPLE).complete(0, changed)
