"""Whether microbatches can do without padding, and why not where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.unpadded.attention import has_own_forward, takes_documents
from torchtune_adaptive.tune.unpadded.isolation import difference_by_place
from torchtune_adaptive.tune.unpadded.kernels import WIDEST_HEAD

logger = logging.getLogger(__name__)

FLASH_ATTENTION_2 = (8, 0)
"""Compute capability: Ampere."""


def is_padded(
    model: nn.Module, settings: Settings, device: torch.device, *, packed: bool, run_model: bool = False
) -> bool:
    """Whether rows are padded, as `adaptive.padding` says; one line of the log, or an error, where they have to be.

    With `run_model` collective, for a model that has its weights: it is given a row of several samples.
    """
    if settings.adaptive.token_budget is None or settings.adaptive.padding:
        return True
    reason = next(_obstacles(model, settings, device, packed=packed), None)
    if run_model:  # one rank's card may be another
        reason = next(filter(None, from_all_ranks(reason)), None) or _found_by_running(model, device)
    if reason is None:
        return False
    if settings.adaptive.padding is False:
        raise ConfigError(f"adaptive.padding is False, but {reason}: set adaptive.padding to null or True")
    if rank() == 0 and not packed:  # of packed rows, the token budget says what becomes of them
        logger.info("token budget · samples are padded: %s", reason)
    return True


def _found_by_running(model: nn.Module, device: torch.device) -> str | None:
    """Collective."""
    apart = difference_by_place(model, device)
    if apart is None:
        return None
    return (
        f"the model's output for a sample depends on the other samples in its row (logits differ by {apart:.1%}), so "
        "one of its modules mixes them"
    )


def _obstacles(model: nn.Module, settings: Settings, device: torch.device, *, packed: bool) -> Iterator[str]:
    if packed:
        yield "the dataset is packed"
    if settings.collate_fn != type(settings).collate_fn:
        yield f"collate_fn is {settings.collate_fn}, which decides how samples share a microbatch"
    if settings.tensor_parallel_dim > 1:
        yield f"tensor_parallel_dim is {settings.tensor_parallel_dim}"
    if not isinstance(model, TransformerDecoder):
        yield f"the model is a {_name(model)}, which takes more than text"
        return
    for layer in model.layers:
        yield from _obstacles_in_attention(getattr(layer, "attn", None), settings, device)


def _obstacles_in_attention(attention: object, settings: Settings, device: torch.device) -> Iterator[str]:
    if not isinstance(attention, MultiHeadAttention):
        yield f"{_name(attention)} is not torchtune's attention, which can keep the samples of a row apart"
        return
    if not takes_documents(attention):
        yield f"the model's attention was replaced by {_name(attention._attention_call)}"
    if has_own_forward(attention):
        yield f"{_name(attention)} overrides forward"
    if attention.attn_dropout:
        yield f"the model has attention dropout ({attention.attn_dropout})"
    if not attention.is_causal:
        yield "the model's attention is not causal"
    yield from _obstacles_on(device, settings, attention.head_dim)


def _obstacles_on(device: torch.device, settings: Settings, head_width: int) -> Iterator[str]:
    """Why there is no attention without padding here: a CPU has it; on a GPU torch's kernel is flash attention only."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        yield f"there is no attention kernel for variable lengths on {'hip' if torch.version.hip else device.type}"
        return
    if settings.dtype == "fp32":
        yield "dtype is fp32, which flash attention on a GPU does not support"
    # a rehearsal is on a card that is not there
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < FLASH_ATTENTION_2:
        yield f"{torch.cuda.get_device_name(device)} (compute capability {capability}) has no flash attention"
    if head_width > WIDEST_HEAD:
        yield f"heads are {head_width} wide, but flash attention supports at most {WIDEST_HEAD}"


def _name(thing: object) -> str:
    """FSDP puts its own class in front of a module's."""
    if hasattr(thing, "__name__"):
        return str(thing.__name__)
    return type(thing).__name__.removeprefix("FSDP")
