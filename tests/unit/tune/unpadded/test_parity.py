"""Samples one after another in a row have the losses and gradients of samples padded to rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torchtune import modules, training
from torchtune.modules import MultiHeadAttention

from tests.unit.tune.unpadded.models import (
    IGNORED,
    LENGTHS,
    MODELS,
    build,
    padded,
    samples,
    totals_and_gradients,
    unpadded,
)
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.unpadded.attention import take_documents, takes_documents
from torchtune_adaptive.tune.unpadded.documents import Documents, joined
from torchtune_adaptive.tune.unpadded.kernels import attend_each

TOLERANCE = 2e-6


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The most by which gradients differ, relative to the largest of their tensor."""
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours)


def compare(model: nn.Module) -> None:
    batch = samples()
    halves = batch[:4], batch[4:]
    totals, expected = totals_and_gradients(model, padded, *halves)
    ours, gradients = totals_and_gradients(model, unpadded, *halves)
    assert ours.target_tokens == totals.target_tokens == sum(LENGTHS) - len(LENGTHS)
    assert ours.loss_sum.item() == pytest.approx(totals.loss_sum.item(), rel=1e-6)
    assert furthest(gradients, expected) < TOLERANCE


@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_padded_rows(kind: str) -> None:
    compare(build(kind))


@pytest.mark.parametrize("kind", ["llama3_2", "lora"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_activation_checkpointing_too(kind: str, mode: str) -> None:
    model = build(kind)
    if mode == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    else:
        training.apply_selective_activation_checkpointing(model, "selective", 2)
    compare(model)


def test_the_gradient_does_not_depend_on_the_split() -> None:
    model, batch = build(), samples()
    totals, whole = totals_and_gradients(model, unpadded, batch)
    same_totals, split = totals_and_gradients(model, unpadded, batch[:1], batch[1:2], batch[2:])
    assert same_totals.target_tokens == totals.target_tokens
    assert furthest(split, whole) < TOLERANCE


def test_no_sample_sees_another() -> None:
    """Other tokens in the samples around it do not change a sample's output."""
    model, (first, second, third) = build().eval(), samples((9, 12, 7))
    (other, *_) = samples((9,), seed=1)
    with torch.no_grad():
        outputs = [model(**_without_labels(joined([before, second, third], IGNORED))) for before in (first, other)]
    one, same = (torch.cat(chunks, dim=1)[0] for chunks in outputs)
    assert not torch.equal(one[:9], same[:9])
    assert torch.equal(one[9:], same[9:])


def _without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def test_a_row_may_be_longer_than_the_model_takes_but_no_sample() -> None:
    model = build()
    assert sum(LENGTHS) > model.max_seq_len == max(LENGTHS)
    totals_and_gradients(model, unpadded, samples())
    assert model.max_seq_len == 64
    with pytest.raises(ConfigError, match="a sample has 65 tokens, but the model takes at most 64"):
        totals_and_gradients(model, unpadded, samples((3, 65)))


def test_the_model_takes_what_it_took_also_after_an_error() -> None:
    model = build()
    model.output = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        totals_and_gradients(model, unpadded, samples())
    assert model.max_seq_len == 64


def test_samples_that_are_tensors_are_joined_like_lists() -> None:
    batch = samples((3, 5))
    tensors = [{key: torch.tensor(value) for key, value in sample.items()} for sample in batch]
    one, other = joined(batch, IGNORED), joined(tensors, IGNORED)
    assert all(torch.equal(one[key], other[key]) for key in ("tokens", "labels", "input_pos"))
    assert batch[1]["labels"][0] != IGNORED, "a sample is not changed"
    assert one["labels"].tolist()[0][0] == one["labels"].tolist()[0][3] == IGNORED
    assert one["input_pos"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert one["mask"].ends.tolist() == [0, 3, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kernel_agrees_with_torchs_sample_by_sample(dtype: torch.dtype) -> None:
    ends = [0, 1, 8, 20]
    sides = [torch.randn(1, 3, 20, 8, dtype=dtype).requires_grad_() for _ in range(3)]
    each = attend_each(*sides, torch.tensor(ends, dtype=torch.int32), 12)
    gradients = torch.autograd.grad(each.float().square().sum(), sides)
    alone = [
        nn.functional.scaled_dot_product_attention(*(side[:, :, start:end] for side in sides), is_causal=True)
        for start, end in pairwise(ends)
    ]
    expected = torch.cat(alone, dim=2)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.float().square().sum(), sides))


def test_the_kernels_pass_the_checks_of_torch_for_custom_operations() -> None:
    sides = [torch.randn(6, 2, 8).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.torchtune_adaptive.attend_each, (*sides, ends))


def test_an_attention_that_somebody_replaced_stays_as_it_is() -> None:
    model = MODELS["llama3_2"](
        vocab_size=8, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=8, intermediate_dim=8, max_seq_len=8
    )
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    own = attentions[0]._attention_call = lambda *args, **kwargs: None
    take_documents(model)
    assert attentions[0]._attention_call is own
    assert [takes_documents(attention) for attention in attentions] == [False, True]


def test_documents_are_where_fsdp_and_checkpointing_look_for_tensors() -> None:
    documents = Documents(torch.tensor([0, 2]), 2)
    leaves, _ = torch.utils._pytree.tree_flatten({"mask": documents})
    assert leaves[0] is documents.ends
