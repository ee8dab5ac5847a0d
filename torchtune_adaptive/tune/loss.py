"""The loss that the config names, and of which tokens it needs logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import training

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError

Logits = Tensor | list[Tensor]


def build_loss(settings: Settings, model: nn.Module) -> nn.Module:
    """The loss; one that takes its logits in chunks makes the model cut them."""
    loss_fn = checked_loss(settings.config)
    if settings.compile:
        training.compile_loss(loss_fn, verbose=False)
    check_cuts(loss_fn, model)
    if hasattr(loss_fn, "num_output_chunks"):
        cast(Any, model).set_num_output_chunks(loss_fn.num_output_chunks)
    return loss_fn


def check_cuts(loss_fn: nn.Module, model: nn.Module) -> None:
    """Refuses a loss that takes logits in chunks, of a model that does not cut them."""
    if hasattr(loss_fn, "num_output_chunks") and not hasattr(model, "set_num_output_chunks"):
        raise ConfigError(
            f"loss expects its logits in {loss_fn.num_output_chunks} chunks, but the model ({type(model).__name__}) "
            "returns them whole: use a model of torchtune's, or loss._component_: torch.nn.CrossEntropyLoss"
        )


def checked_loss(cfg: DictConfig) -> nn.Module:
    loss_fn: nn.Module = components.build("loss", cfg)
    if not hasattr(loss_fn, "ignore_index"):
        raise ConfigError(
            f"loss is {cfg.loss.get('_component_')}, which has no ignore_index: use a cross-entropy loss, "
            "for example torchtune.modules.loss.CEWithChunkedOutputLoss"
        )
    return loss_fn


@contextmanager
def scoring_only(model: nn.Module, chosen: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """While open, the model makes logits of the states that are chosen from those of all tokens; None: of all.

    What follows a token of a prompt is neither learned nor judged; logits may be the largest tensors there are.
    """
    if chosen is None:
        yield
        return
    norm = cast(nn.Module, model.norm)
    handle = norm.register_forward_pre_hook(lambda _, states: (chosen(states[0]),))
    try:
        yield
    finally:
        handle.remove()


def zero_of(logits: Logits) -> Tensor:
    """Zero loss with zero gradients: the mean over no tokens would be NaN, and no backward at all a hang."""
    chunks = [logits] if isinstance(logits, Tensor) else logits
    return torch.stack([chunk.sum() for chunk in chunks]).sum() * 0.0
