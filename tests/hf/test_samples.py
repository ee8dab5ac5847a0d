"""Samples before collation: their labels in the check of a loss, and how they reach a trainer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch

from tests.hf.trainers import Counting, arguments, train
from torchtune_adaptive.hf import AdaptiveArguments
from torchtune_adaptive.hf.samples import CollatedBatch, GeneratedRow, KeepSamples, RawSample

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_of_tokens_keep_their_type(kind: Any) -> None:
    sample = RawSample({"input_ids": kind([5, 6, 7]), "labels": kind([-100, 6, 7])})
    assert [*sample.with_targets().features["labels"]] == [6, 6, 7]
    few = sample.with_targets(few=True).features["labels"]
    assert [*few] == [6, 6, -100]
    assert type(few) is type(sample.features["labels"])


@pytest.mark.parametrize("labels", [[0.5, 1.5, 2.5], torch.rand(3), torch.rand(3, 2), [{"boxes": 1}] * 3, None])
def test_other_labels_are_not_changed(labels: Any) -> None:
    sample = RawSample({"input_ids": [5, 6, 7], "labels": labels})
    assert sample.with_targets(few=True).features["labels"] is labels


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("features", "inputs", "lengths"),
    [
        # text: as before collation, with padding or without
        ({"input_ids": [1, 2]}, lambda count: {"input_ids": ones(count, 8)}, [2]),
        ({"input_ids": [1, 2]}, lambda count: {"input_ids": ones(1, 2 * count)}, [2]),
        ({"input_ids": [1] * 9}, lambda count: dict.fromkeys(("input_ids", "attention_mask"), ones(count, 8)), [9]),
        # the collator makes tokens, or adds some; 6 of 8 are no padding
        ({"text": ""}, lambda count: {"input_ids": ones(count, 8)}, [8]),
        (
            {"input_ids": [1, 2]},
            lambda count: {"input_ids": ones(count, 8), "attention_mask": ones(count, 8).tril(5)},
            None,
        ),
        (
            {"chosen_ids": [1], "rejected_ids": [1, 2]},
            lambda count: dict.fromkeys(("input_ids", "attention_mask"), ones(2 * count, 8)),
            [8, 8],
        ),
        # audio and images without tokens
        ({}, lambda count: {"labels": ones(count, 7), "attention_mask": ones(count, 90)}, [7]),
        ({}, lambda count: {"pixel_values": torch.ones(count, 3, 4, 4), "labels": ones(count)}, [1]),
    ],
)
def test_tokens_that_a_collator_adds_are_counted(features: Any, inputs: Any, lengths: Any) -> None:
    batch = KeepSamples(lambda samples: inputs(len(samples)))([features, features])
    expected = [[6], [7]] if lengths is None else [lengths] * 2
    assert [sample.row_lengths for sample in batch["adaptive_samples"].samples] == expected


@pytest.mark.parametrize("random", [True, False])
def test_batch_with_nested_tensors_and_nan_is_compared(random: bool) -> None:
    def nested(features: list[Any]) -> Any:
        noise = torch.rand(2) if random else torch.tensor([1.0, torch.nan])
        return {"inputs": {"values": noise}, "labels": torch.zeros(len(features), dtype=torch.int64)}

    keeps = KeepSamples(nested)
    inputs = keeps([{"a": 1}, {"a": 2}])
    batch: CollatedBatch = inputs.pop("adaptive_samples")
    batch.inputs = inputs
    assert batch.is_reproducible(keeps) is not random


def test_samples_that_cannot_be_pickled_are_an_error_of_the_worker(tmp_path: Path) -> None:
    data = [{**each, "decoder": threading.Lock()} for each in Counting(24)]
    settings = arguments(tmp_path, dataloader_num_workers=1, remove_unused_columns=False)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        train(tmp_path, AdaptiveArguments(), train_dataset=data, arguments=settings)


def test_padding_after_the_longest_answer_is_cut() -> None:
    ids, mask = torch.arange(1, 16).reshape(3, 5), torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    inputs = {"prompt_ids": ones(3, 2), "prompt_mask": ones(3, 2), "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": torch.ones(3), "ref_per_token_logps": ids.float(), "num_items_in_batch": torch.tensor(8)}
    rows = GeneratedRow.all_of(inputs)
    assert [row.length for row in rows] == [4, 3, 7]
    batch = CollatedBatch.of(rows[:2], lambda _: None)
    assert batch.inputs["completion_ids"].shape == (2, 5)
    assert batch.is_reproducible(lambda _: None)
    cut = batch.without_padding().inputs
    assert cut["completion_ids"].tolist() == ids[:2, :2].tolist()
    assert cut["ref_per_token_logps"].shape == cut["completion_mask"].shape == (2, 2)
    assert cut["prompt_ids"].shape == (2, 2)
    longest = rows[0].resized(4, 6)
    assert longest.length == 10
    assert longest.features["completion_ids"].tolist() == [[1, 2, 3, 4, 5, 5]]
