"""What a sequence costs a model: samples are dealt to the ranks by it, and ranks are compared by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerDecoder

Cost: TypeAlias = Callable[[int], float]


def cost_of(model: nn.Module) -> Cost:
    """What a sequence of so many tokens costs, in tokens: the products of the layers, and what attention adds.

    Nothing is added where that is not known: where a model takes more than text, or has an attention of its own.
    """
    layer = next(iter(model.layers), None) if isinstance(model, TransformerDecoder) else None
    attention = getattr(layer, "attn", None)
    if layer is None or not isinstance(attention, MultiHeadAttention):
        return float
    # a token meets each parameter once; and, on average, half of the tokens of its sample in two products
    width = attention.num_heads * attention.head_dim
    per_pair = width / sum(parameter.numel() for parameter in layer.parameters())
    return lambda length: length * (1 + per_pair * length)
