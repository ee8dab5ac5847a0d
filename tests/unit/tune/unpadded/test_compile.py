"""Compiled layers take microbatches of any sizes: few graphs, no break, and the gradients of eager layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torchtune import modules, training

from tests.unit.tune.unpadded.models import build, samples, totals_and_gradients, unpadded
from tests.unit.tune.unpadded.test_parity import furthest

SIZES = [
    (3, 17),
    (5, 9, 2),
    (64,),
    (1, 1, 1, 1),
    (33, 8),
    (2,),
    (40, 40, 40),
    (7, 6),
    (12,),
    (3, 3, 50),
    (9, 61),
    (21, 2),
]
MOST_GRAPHS = 3
"""Of a layer: one for the first size, one for any other, and one for what is only one token or sample."""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without code generation, which takes minutes and changes neither graphs nor breaks."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_twelve_sizes_take_few_graphs_and_no_break(checkpointing: bool) -> None:
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
    # layers share their code, and so their graphs
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
