"""The stages of a step, and the recovery that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import Sample
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
