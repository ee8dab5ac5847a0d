"""Logits of a row's targets only: there is nothing to learn from what follows a token of the prompt.

A vocabulary is the widest layer of a model, and logits are its largest tensors. With padding rows are stock's to the
bit, so there every token has its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from torchtune_adaptive.tune.parts.unpadded.documents import Documents


def targets_of(batch: dict[str, Any], labels: Tensor, ignored: int) -> Tensor | None:
    """Positions in the row whose label counts, or the first if none does; None where rows are padded."""
    if not isinstance(batch.get("mask"), Documents):
        return None
    positions = labels[0].ne(ignored).nonzero()[:, 0]
    # a layer that gets no token at all is more than its kernels have been tried with
    return positions if len(positions) else positions.new_zeros(1)


@contextmanager
def scoring_only(model: nn.Module, targets: Tensor | None) -> Iterator[None]:
    """While open, the model's last norm and its output see these tokens of the row, and no others."""
    if targets is None:
        yield
        return
    norm = cast(nn.Module, model.norm)
    handle = norm.register_forward_pre_hook(lambda _, states: (states[0].index_select(1, targets),))
    try:
        yield
    finally:
        handle.remove()
