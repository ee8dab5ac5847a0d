"""Without padding, tokens of a prompt get no logits; losses and gradients are what they are with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torchtune import modules, training

from tests.unit.tune.unpadded.models import (
    IGNORED,
    MODELS,
    build,
    padded,
    samples,
    totals_and_gradients,
    unpadded,
)
from tests.unit.tune.unpadded.test_parity import TOLERANCE, furthest
from torchtune_adaptive.tune.samples import Sample

PROMPTS = (0, 4, 30, 1, 18, 2, 5, 1, 39)
"""Tokens that are not learned, of samples of `LENGTHS`: none, some, all but one, all."""


def with_prompts() -> list[Sample]:
    return [
        {"tokens": sample["tokens"], "labels": [IGNORED] * prompt + sample["labels"][prompt:]}
        for sample, prompt in zip(samples(), PROMPTS, strict=True)
    ]


def without_answers() -> list[Sample]:
    return [{**sample, "labels": [IGNORED] * len(sample["labels"])} for sample in samples()]


@contextmanager
def counting_scored(model: nn.Module) -> Iterator[list[int]]:
    """Tokens that the last norm sees, pass by pass."""
    seen: list[int] = []

    def see(_: nn.Module, __: tuple[Tensor, ...], states: Tensor) -> None:
        seen.append(states.size(0) * states.size(1))

    handle = model.norm.register_forward_hook(see)
    yield seen
    handle.remove()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_padded_rows(kind: str, checkpointing: bool) -> None:
    model, batch = build(kind), with_prompts()
    if checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    totals, expected = totals_and_gradients(model, padded, batch[:4], batch[4:])
    ours, gradients = totals_and_gradients(model, unpadded, batch[:4], batch[4:])
    assert ours.target_tokens == totals.target_tokens
    assert ours.loss_sum.item() == pytest.approx(totals.loss_sum.item(), rel=1e-6)
    assert furthest(gradients, expected) < TOLERANCE


@pytest.mark.parametrize("chunks", [0, 8])
def test_logits_are_those_of_targets_only(chunks: int) -> None:
    model = build()
    model.set_num_output_chunks(chunks)
    loss_fn = None if chunks else nn.CrossEntropyLoss(ignore_index=IGNORED)
    with counting_scored(model) as seen:
        ours, gradients = totals_and_gradients(model, unpadded, with_prompts(), loss_fn=loss_fn)
        totals, expected = totals_and_gradients(model, padded, with_prompts(), loss_fn=loss_fn)
    assert seen == [ours.target_tokens, len(PROMPTS) * 64]
    assert 0 < ours.target_tokens == totals.target_tokens < sum(map(len, (s["tokens"] for s in samples()))) / 2
    assert furthest(gradients, expected) < TOLERANCE


def test_where_nothing_is_learned_gradients_are_zero_and_there_all_the_same() -> None:
    """FSDP waits for a gradient of every parameter on every rank."""
    model = build()
    with counting_scored(model) as seen:
        totals, gradients = totals_and_gradients(model, unpadded, without_answers())
    assert seen == [1]
    assert totals.target_tokens == 0
    assert totals.loss_sum.item() == 0.0
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


def test_what_runs_the_model_afterwards_gets_all_logits_also_after_an_error() -> None:
    model, tokens = build(), torch.zeros(1, 12, dtype=torch.int64)
    totals_and_gradients(model, unpadded, with_prompts())
    output, model.output = model.output, lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        totals_and_gradients(model, unpadded, with_prompts())
    model.output = output
    assert sum(chunk.size(1) for chunk in model(tokens)) == 12
