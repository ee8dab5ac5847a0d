"""The loss that the config names, and of which tokens it needs logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import training

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.start import components
from torchtune_adaptive.tune.start.settings import Settings


def build_loss(settings: Settings, model: nn.Module) -> nn.Module:
    """The loss; one that takes its logits in chunks makes the model cut them."""
    loss_fn = checked_loss(settings.config)
    if settings.compile:
        training.compile_loss(loss_fn, verbose=False)
    if hasattr(loss_fn, "num_output_chunks"):
        cast(Any, model).set_num_output_chunks(loss_fn.num_output_chunks)
    return loss_fn


def checked_loss(cfg: DictConfig) -> nn.Module:
    loss_fn: nn.Module = components.build("loss", cfg)
    if not hasattr(loss_fn, "ignore_index"):
        raise ConfigError(
            f"loss is {cfg.loss.get('_component_')}, which has no ignore_index: allowed is a cross-entropy loss, "
            "for example torchtune.modules.loss.CEWithChunkedOutputLoss"
        )
    return loss_fn


@contextmanager
def scoring_only(model: nn.Module, chosen: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, the model makes logits of the states that are chosen from those of all tokens, and of no others.

    What follows a token of a prompt is neither learned nor judged; logits may be the largest tensors there are.
    """
    norm = cast(nn.Module, model.norm)
    handle = norm.register_forward_pre_hook(lambda _, states: (chosen(states[0]),))
    try:
        yield
    finally:
        handle.remove()
