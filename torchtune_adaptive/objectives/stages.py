"""The stages of a step, and the recovery that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.data.unpadded import is_padded
from torchtune_adaptive.engine.limit_policy import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import Stages, StepRunner
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.lifecycle.run_state import THIS_RUN

OnChange = Callable[[Change], object]
StagePasses: TypeAlias = Mapping[str, tuple[nn.Module, Callable[[Sequence[Sample]], Totals]]]
"""The model and the microbatch function of each stage, in order. The last stage computes the loss."""


def build_stages(
    passes: StagePasses, data: Data, settings: Settings, device: torch.device, on_change: OnChange
) -> Stages[Sample]:
    """Collective: build the stages of a step, with an initial limit of `batch_size` samples. Concatenate samples
    instead of padding them, if the config and the model allow it."""
    trained, *others = dict.fromkeys(model for model, _ in reversed([*passes.values()]))
    if not is_padded(trained, settings, device, packed=data.packed, run_model=True):
        data.remove_padding()
    return stages_of(passes, data, settings.batch_size, build_recovery(settings, on_change, trained, *others))


def stages_of(passes: StagePasses, data: Data, rows: int, recovery: Recovery) -> Stages[Sample]:
    """Build the stages, with an initial limit of `rows` rows."""
    stages: Stages[Sample] = Stages()
    for stage, (model, run) in passes.items():
        kind, limit = data.kind.for_steps(model), RowLimit(rows)
        stages[stage] = StepRunner(model, run, kind=kind, limit=limit, recovery=recovery, stage=stage)
    return stages


def build_recovery(settings: Settings, on_change: OnChange, *models: nn.Module) -> Recovery:
    """Collective: build the recovery that all stages of a step share."""
    if settings.optimizer_in_bwd and settings.adaptive.recover_from_oom:
        log_rank_0("recovery from out-of-memory errors is off: optimizer_in_bwd updates weights inside the backward")
    return Recovery(
        *models,
        enabled=settings.adaptive.recover_from_oom and not settings.optimizer_in_bwd,
        regrow_after=settings.adaptive.regrow_after,
        stop_requested=THIS_RUN.stop_requested,
        on_change=on_change,
    )
