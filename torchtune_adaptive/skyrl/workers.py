"""Adaptive workers for SkyRL.

A method of SkyRL's workers splits a batch, runs each microbatch and combines their results. An adaptive worker runs the
microbatches with a StepRunner, until no rank runs out of memory. SkyRL's own method runs each of them. With the last
one, SkyRL's method for the batch gets these results and restores the order of the rows. Then metrics are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (
    FSDPCriticWorkerBase,
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)
from skyrl.backends.skyrl_train.workers.worker import Worker

from torchtune_adaptive.arguments import AdaptiveArguments
from torchtune_adaptive.errors import AdaptiveError, ConfigError, Remedy
from torchtune_adaptive.skyrl.passes import FORWARD, TRAIN, WITH_LOSS, WorkerPasses

REMEDIES_AS_KEYS = {
    Remedy.SHORTER_SAMPLES: "lower trainer.max_prompt_length or generator.sampling_params.max_generate_length",
    Remedy.CHECKPOINT_ACTIVATIONS: "set trainer.gradient_checkpointing=true",
    Remedy.MORE_RANKS: "shard the model over more GPUs",
    Remedy.LARGER_BUDGET: "raise memory_limit, or lower gpu_memory_utilization of inference engines on the same GPU",
    Remedy.SMALLER_LIMIT: "lower trainer.micro_train_batch_size_per_gpu",
    Remedy.NO_RECOVERY: "pass recover_from_oom=False to adaptive()",
    Remedy.RECOVERY: "remove recover_from_oom=False from adaptive()",
    Remedy.FEWER_ROWS: "remove use_maximum_batch_size=True",
    Remedy.CAP_MEMORY: "pass memory_limit to adaptive(), for example '8GiB'",
}
"""The text of each remedy, expressed as a key of SkyRL's config or an argument of `adaptive`."""


@dataclass(frozen=True)
class SkyRLArguments(AdaptiveArguments):
    """Arguments of `adaptive`. A search needs the two lengths, because batches may be shorter than the longest one."""

    max_prompt_length: int | None = field(default=None, metadata={"help": "Tokens of the longest prompt."})
    max_generate_length: int | None = field(default=None, metadata={"help": "Tokens of the longest answer."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_prompt_length", "max_generate_length"):
            length = getattr(self, name)
            if length is not None and (type(length) is not int or length < 1):
                raise ConfigError(f"{name}: {length!r} is invalid; allowed: a number of tokens")
        if self.searches and not (self.max_prompt_length and self.max_generate_length):
            raise ConfigError(
                "a search measures the longest sequence: pass max_prompt_length (trainer.max_prompt_length) and "
                "max_generate_length (generator.sampling_params.max_generate_length) to adaptive()"
            )


class AdaptiveWorker(Worker):
    """Mixin for SkyRL's workers. If any rank runs out of memory, all ranks repeat the batch in smaller microbatches."""

    arguments = SkyRLArguments()
    passes: WorkerPasses | None = None
    """Created in the first pass, because the model is sharded by then."""

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: see SkyRL's method. The metrics also contain the recoveries and the limit of a microbatch."""
        method = super().forward_backward
        return self._run_pass(TRAIN, "_forward_backward_micro", method, data, *args, **kwargs)

    def forward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: see SkyRL's method."""
        method = super().forward
        if (args[0] if args else kwargs.get("loss_fn")) is not None:
            return self._run_pass(WITH_LOSS, "_forward_micro_with_loss", method, data, *args, **kwargs)
        return self._run_pass(FORWARD, "_forward_micro_batch", method, data)

    def _run_pass(self, stage: str, *args: Any, **kwargs: Any) -> Any:
        try:
            self.passes = self.passes or WorkerPasses(self, self.arguments)
            return self.passes.run(stage, *args, **kwargs)
        except AdaptiveError as error:
            error.fact, error.remedies = error.in_words(REMEDIES_AS_KEYS), ()
            raise


def adaptive(worker_class: Any, settings: Mapping[str, Any] | None = None, /, **arguments: Any) -> Any:
    """Return an adaptive subclass of one of SkyRL's FSDP workers, for example of `PolicyWorker`.

    If the class is a Ray actor, the result is one, too. `settings` and `arguments` are fields of SkyRLArguments.
    """
    actor = getattr(worker_class, "__ray_metadata__", None)
    base = worker_class if actor is None else actor.modified_class.__mro__[1]
    kinds = (FSDPPolicyWorkerBase, FSDPCriticWorkerBase, FSDPRefWorkerBase)
    if not (isinstance(base, type) and issubclass(base, kinds)):
        raise TypeError(
            f"adaptive() got {worker_class!r}: pass a PolicyWorker, CriticWorker or RefWorker of SkyRL's FSDP"
        )
    made = _adaptive(base, getattr(base, "arguments", SkyRLArguments()).changed(**{**(settings or {}), **arguments}))
    options = getattr(worker_class, "_default_options", None)
    if actor is None:
        return made
    return ray.remote(**options)(made) if options else ray.remote(made)


@cache
def _adaptive(base: type, arguments: SkyRLArguments) -> type:
    bases = (base,) if issubclass(base, AdaptiveWorker) else (AdaptiveWorker, base)
    return type(f"Adaptive{base.__name__}", bases, {"__module__": __name__, "arguments": arguments})
