"""The one place where torchtune's attention is replaced: by one that takes `Documents` for a mask, too.

torchtune's decoder hands its mask on untouched, and its attention asks only whether there is one, then calls a
function that is an attribute of the instance. So nothing of torchtune is replaced but that attribute, before anything
is compiled.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention
from torchtune.modules.attention_utils import _sdpa_or_flex_attention

from torchtune_adaptive.tune.unpadded.documents import Documents
from torchtune_adaptive.tune.unpadded.kernels import attend_each


class EachAlone:
    """torchtune's attention; of a row that is several samples, each sees itself alone."""

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self.stock = stock

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool) -> Tensor:
        if isinstance(mask, Documents):
            assert not dropout_p, "the kernels drop nothing: such a model has padded rows"
            return attend_each(q, k, v, mask.ends, mask.longest)
        return self.stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)


def take_documents(model: nn.Module) -> None:
    """Every attention of torchtune's own in the model takes them; one that was replaced already stays as it is."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and _is_stock(module._attention_call):
            module._attention_call = EachAlone(module._attention_call)


def takes_documents(attention: object) -> bool:
    return isinstance(attention, MultiHeadAttention) and isinstance(attention._attention_call, EachAlone)


def has_own_forward(attention: MultiHeadAttention) -> bool:
    """Whether a subclass, or somebody who has the instance, decides what its attention is asked."""
    return "forward" in vars(attention) or type(attention).forward is not MultiHeadAttention.forward


def _is_stock(call: object) -> bool:
    """torchtune makes the function anew for each module, of the same code."""
    return getattr(call, "__code__", None) is _sdpa_or_flex_attention().__code__
