"""What a step takes in that no model has: a checkpoint of nothing but shapes, and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from torchtune import training
from torchtune.modules.peft import get_adapter_params

from torchtune_adaptive.prediction.shims import HOST, META
from torchtune_adaptive.tune.config import components
from torchtune_adaptive.tune.config.settings import Settings
from torchtune_adaptive.tune.parts.data import Batching, Collate, build_collate, is_packed
from torchtune_adaptive.tune.parts.devices import dtype_of
from torchtune_adaptive.tune.parts.model import Weights
from torchtune_adaptive.tune.parts.samples import Kind, Sample
from torchtune_adaptive.tune.parts.unpadded.documents import Batch, joined
from torchtune_adaptive.tune.parts.unpadded.support import is_padded


def traced_batching(settings: Settings, model: nn.Module, kind: Kind) -> Batching:
    """How training makes microbatches of samples of this kind, padded or not."""
    packed = is_packed(settings.config)
    if not is_padded(model, settings, torch.device(settings.device), packed=packed):
        return Batching(replace(kind, padded=False), on_host(partial(joined, ignored=kind.ignored_label)))
    if packed:
        return Batching(kind, on_host(stacked))
    collate = build_collate(settings, SimpleNamespace(pad_id=0), kind.ignored_label, packed=False)
    return Batching(kind, on_host(collate))


def made_up_checkpoint(settings: Settings, key: str = "model") -> dict[str, Weights]:
    """Weights of the right shapes: the model's own, made without sharding."""
    with training.set_default_dtype(dtype_of(settings, HOST)), META:
        whole = components.build(key, settings.config)
    weights = {key: torch.empty_like(weight, device=HOST) for key, weight in whole.state_dict().items()}
    adapters = {key: weights.pop(key) for key in get_adapter_params(whole)}
    return {training.MODEL_KEY: weights, **({training.ADAPTER_KEY: adapters} if adapters else {})}


def on_host(collate: Collate) -> Collate:
    """Collates on the host, outside of the trace: what collating needs besides its result depends on the rows."""

    def collate_on_host(samples: Sequence[Sample]) -> Batch:
        with no_dispatch():
            batch = collate(samples)
        copies: Batch = tree_map_only(Tensor, torch.clone, batch)
        return copies

    return collate_on_host


def stacked(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Packed rows as a batch, without their mask, whose memory is next to nothing."""
    return {key: torch.tensor([sample[key] for sample in samples]) for key in ("tokens", "labels", "input_pos")}
