"""What all stages of a step share: the ledger of collectives, the agreement, settings and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.consistency import compare_replicas
from torchtune_adaptive.engine.fsdp_ledger import FsdpLedger
from torchtune_adaptive.engine.ghost_ledger import GhostLedger
from torchtune_adaptive.engine.ledger import Ledger
from torchtune_adaptive.engine.limit_policy import Change
from torchtune_adaptive.engine.memory import RetriesSeen
from torchtune_adaptive.engine.ranks import Agreement, use_communicators, world_size
from torchtune_adaptive.engine.results import REPORT_COLUMNS
from torchtune_adaptive.errors import ConfigError, RecoveryUnsupportedError, Remedy
from torchtune_adaptive.formatting import is_whole


class Recovery:
    """The state that all stages of a step share: the ledger of collectives, settings and callbacks.

    A stage is a pass of one StepRunner over the samples of a step. Most training steps have a single stage.

    Args:
        models: all models that the stages run, including frozen ones. A stage owns its runner's model and all frozen
            models. If the stage fails, only these are reset, so gradients in the models of other stages remain.
        enabled: False to let an out-of-memory error end the run.
        exchanges_activations: True if ranks exchange activations, but no mesh of a parameter shows it, as in context
            parallelism. Tensor and expert parallelism are detected by these meshes. Ranks that share samples, for
            example under tensor parallelism, must pass the same samples to `StepRunner.run`.
        regrow_after: a lowered limit grows again after this many steps without out-of-memory errors or allocator
            retries; 0 to keep it low.
        stop_requested: called once per attempt. If it returns True on any rank, for example after a signal, the
            result of that step has `stop_requested` on all ranks.
        on_change: called on every rank when a limit changes, or when memory runs out at the smallest limit.
    """

    def __init__(
        self,
        *models: nn.Module,
        enabled: bool = True,
        exchanges_activations: bool = False,
        regrow_after: int = 200,
        stop_requested: Callable[[], bool] = lambda: False,
        on_change: Callable[[Change], object] = lambda _: None,
    ) -> None:
        """Collective: on CUDA, create a gloo group for agreements. Shard the models first."""
        for reason in filter(None, map(fsdp.why_recovery_is_off, models if enabled else ())):
            raise RecoveryUnsupportedError(
                f"a step of this model cannot be repeated after an out-of-memory error: {reason}", Remedy.NO_RECOVERY
            )
        if not is_whole(regrow_after, at_least=0):
            raise ConfigError(f"regrow_after: {regrow_after!r} steps; give 0 (never) or a larger whole number")
        self.models, self.enabled, self.regrow_after = models, enabled, regrow_after
        self.stop_requested, self.on_change = stop_requested, on_change
        if enabled:
            use_communicators(models)
        self.ledger = new_ledger(models, enabled=enabled, exchanges_activations=exchanges_activations)
        self.agreement = Agreement(REPORT_COLUMNS)
        self._stages: set[str] = set()
        self.retries_seen = RetriesSeen()
        self._compared = self._closed = False

    def add_stage(self, stage: str, model: nn.Module) -> None:
        """Register a stage; raise ValueError for an unknown model or a second stage of the same name."""
        if not any(model is known for known in self.models):
            raise ValueError("the model of a StepRunner is unknown to its Recovery: pass it to Recovery(...)")
        if stage in self._stages:
            raise ValueError(f"this Recovery has a runner for stage {stage!r} already: give each its own `stage`")
        self._stages.add(stage)

    def owned_by(self, model: nn.Module) -> list[nn.Module]:
        """Return the models that the stage of this model owns."""
        return [each for each in self.models if each is model or not any(p.requires_grad for p in each.parameters())]

    def count_others_with_gradients(self, model: nn.Module) -> int:
        """Return the number of models, except this one, that have gradients now."""
        return sum(has_gradients(each) for each in self.models if each is not model)

    def begin_step(self) -> None:
        """Collective in the first call, which checks that replicas have equal weights. Raise ValueError if closed."""
        if self._closed:
            raise ValueError("this StepRunner is closed, so it can no longer recover: create a new one")
        if not self._compared:
            compare_replicas(self.models)
            self._compared = True

    def close(self) -> None:
        """Restore FSDP's own collectives."""
        self._closed = True
        self.ledger.close()


def has_gradients(model: nn.Module) -> bool:
    """Return True if a parameter of the model has a gradient."""
    return any(parameter.grad is not None for parameter in model.parameters())


def new_ledger(models: Sequence[nn.Module], *, enabled: bool, exchanges_activations: bool) -> Ledger:
    """Return the ledger for these models. `ledger.py` has a table of the three kinds."""
    if not enabled or world_size() == 1:
        return Ledger(*models)
    if exchanges_activations or any(map(fsdp.exchanges_activations, models)):
        return GhostLedger(*models)
    return FsdpLedger(*models)
