"""Packed samples have the losses and gradients of padded rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchtune import modules, training

from tests.unit.data.models import (
    IGNORED,
    LENGTHS,
    MODELS,
    build,
    furthest,
    padded,
    samples,
    totals_and_gradients,
    unpadded,
)
from torchtune_adaptive.data import unpadded as unpadded_rows
from torchtune_adaptive.data.samples import Sample

TOLERANCE = 2e-6
PROMPTS = (0, 4, 30, 1, 18, 2, 5, 1, 39)
"""Unlearned tokens of samples of `LENGTHS`: none, some, all but one, all."""
SIZES = [(3, 17), (5, 9, 2), (64,), (1, 1, 1, 1), (33, 8), (2,), (40, 40, 40), (7, 6), (12,), (3, 3, 50), (9, 61)]
MOST_GRAPHS = 3
"""Per layer: one for the first size, one for any other, and one for a single token or sample."""


def with_prompts(prompts: tuple[int, ...] = PROMPTS) -> list[Sample]:
    return [
        {"tokens": sample["tokens"], "labels": [IGNORED] * prompt + sample["labels"][prompt:]}
        for sample, prompt in zip(samples(), prompts, strict=True)
    ]


@contextmanager
def counting_scored(model: nn.Module) -> Iterator[list[int]]:
    """Count the tokens that reach the last norm in each pass."""
    seen: list[int] = []
    handle = model.norm.register_forward_hook(lambda _, __, states: seen.append(states.size(0) * states.size(1)))
    yield seen
    handle.remove()


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [*((kind, "none") for kind in MODELS), *((kind, how) for kind in ("llama3_2", "lora") for how in ("full", "some"))],
)
def test_losses_and_gradients_are_those_of_padded_rows(kind: str, checkpointing: str) -> None:
    model = build(kind)
    if checkpointing == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    elif checkpointing == "some":
        training.apply_selective_activation_checkpointing(model, "selective", 2)
    for batch in (samples(), with_prompts()):
        totals, expected = totals_and_gradients(model, padded, batch[:4], batch[4:])
        ours, gradients = totals_and_gradients(model, unpadded, batch[:4], batch[4:])
        assert ours.target_tokens == totals.target_tokens > 0
        assert ours.loss_sum.item() == pytest.approx(totals.loss_sum.item(), rel=1e-6)
        assert furthest(gradients, expected) < TOLERANCE


@pytest.mark.parametrize("chunks", [0, 8])
def test_logits_are_computed_for_targets_only(chunks: int) -> None:
    model = build()
    model.set_num_output_chunks(chunks)
    loss_fn = None if chunks else nn.CrossEntropyLoss(ignore_index=IGNORED)
    with counting_scored(model) as seen:
        ours, gradients = totals_and_gradients(model, unpadded, with_prompts(), loss_fn=loss_fn)
        totals, expected = totals_and_gradients(model, padded, with_prompts(), loss_fn=loss_fn)
    assert seen == [ours.target_tokens, len(PROMPTS) * 64]
    assert 0 < ours.target_tokens == totals.target_tokens < sum(LENGTHS) / 2
    assert furthest(gradients, expected) < TOLERANCE


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable code generation, which takes minutes and changes neither graphs nor breaks."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def attend_whole_row(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True) * (ends[-1] / query.size(2))


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_handle_all_sizes_with_few_graphs_and_no_break(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One kernel for the whole row, as on a GPU; on a CPU, a loop interrupts the compiled code.
    monkeypatch.setattr(unpadded_rows, "_attend_each_on_cpu", attend_whole_row)
    batches = [samples(lengths, seed=seed) for seed, lengths in enumerate(SIZES)]
    totals, expected = totals_and_gradients(build(), unpadded, *batches)
    compiled = build()
    training.compile_model(compiled, verbose=False)
    if checkpointing:
        training.set_activation_checkpointing(compiled, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    ours, gradients = totals_and_gradients(compiled, unpadded, *batches)
    assert ours.loss_sum.item() == pytest.approx(totals.loss_sum.item(), rel=1e-5)
    renamed = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in gradients.items()}
    assert furthest(renamed, expected) < 1e-5
    assert not counters["graph_break"]
    # layers share their code and therefore their graphs
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
