"""Samples before collation, and losses that do or do not add up over microbatches of them."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer

from tests.hf.trainers import (
    STEPS,
    Counting,
    arguments,
    changing_loss,
    difference,
    failing_in_forward,
    tiny_llama,
    train,
)
from torchtune_adaptive.hf import AdaptiveArguments
from torchtune_adaptive.hf.losses import (
    CHECKED_TOKENS,
    SHORTER,
)
from torchtune_adaptive.hf.passes import GenerationPasses
from torchtune_adaptive.hf.samples import CollatedBatch, GeneratedRow, KeepSamples, RawSample

pytestmark = pytest.mark.timeout(300)


def test_loss_check_that_runs_out_of_memory_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = train(tmp_path, arguments=arguments(tmp_path))
    fails = failing_in_forward(Trainer, 2)
    assert difference(train(tmp_path, AdaptiveArguments(), base=fails, arguments=arguments(tmp_path)), stock) == 0.0
    assert "ran out of memory, so it is skipped" in caplog.text
    again = train(tmp_path, AdaptiveArguments(), base=fails, faults=[(3, 40)], arguments=arguments(tmp_path))
    assert again.column("oom_recoveries")[-1] == 1
    assert difference(again, stock) < 1e-6


def test_loss_check_runs_short_samples_and_only_if_steps_can_be_split(tmp_path: Path) -> None:
    checked: list[tuple[int, ...]] = []

    class Records(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                checked.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **kwargs)

    rows = [{"input_ids": [*range(100)] * 2, "labels": [*range(100)] * 2} for _ in range(32)]
    for batch_size, passes in (1, []), (2, [(1, CHECKED_TOKENS), (1, SHORTER), (2, CHECKED_TOKENS)]):
        checked.clear()
        options = arguments(tmp_path, per_device_train_batch_size=batch_size, max_steps=5)
        train(tmp_path, AdaptiveArguments(), base=Records, train_dataset=rows, arguments=options)
        assert checked == passes


@pytest.mark.parametrize("begins_at", [1, 3])
def test_run_with_losses_that_are_nan_continues_like_stock(begins_at: int, tmp_path: Path) -> None:
    def change(trainer: Any, loss: Any) -> Any:
        return loss * (math.nan if trainer.state.global_step + 1 >= begins_at else 1)

    options: dict[str, Any] = {"base": changing_loss(change), "arguments": arguments(tmp_path)}
    ours, stock = (train(tmp_path, adaptive, **options) for adaptive in (AdaptiveArguments(), None))
    assert len(ours.log) == STEPS
    np.testing.assert_array_equal(ours.column("loss"), stock.column("loss"))  # which may be NaN


@pytest.mark.parametrize("in_weights", [False, True], ids=["autocast", "bf16 weights"])
def test_small_term_that_compares_samples_is_found_in_16_bits(
    in_weights: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Contrastive(Trainer):
        share = 0.0

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            given = model(**inputs, output_hidden_states=True)
            means = F.normalize(given.hidden_states[-1].mean(1).float(), dim=-1)
            return given.loss + self.share * F.cross_entropy(means @ means.T / 0.5, torch.arange(len(means)))

    for share, recovers in (0.0, True), (0.1, False):
        caplog.clear()
        Contrastive.share = share
        given = {"model": tiny_llama().bfloat16()} if in_weights else {}
        settings = arguments(tmp_path, max_steps=1, bf16=not in_weights)
        train(tmp_path, AdaptiveArguments(), base=Contrastive, arguments=settings, **given)
        assert ("which is not only rounded" not in caplog.text) is recovers


# samples


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


@pytest.mark.parametrize("renamed", ["", "_generate_single_turn"])
def test_trainer_of_trl_without_a_method_that_passes_need_trains_with_one_warning(
    renamed: str, caplog: pytest.LogCaptureFixture
) -> None:
    methods = "_get_per_token_logps_and_entropies", "_generate_single_turn", "reward_funcs", "use_vllm"
    trainer: Any = SimpleNamespace(_is_vlm=True, **{name: [] for name in methods if name != renamed})
    shared: Any = SimpleNamespace(recovery=SimpleNamespace(enabled=True))
    passes = GenerationPasses(trainer, shared)
    for _ in range(2):
        with passes.recovering():
            pass
    assert caplog.text.count("has no _generate_single_turn") == bool(renamed)
