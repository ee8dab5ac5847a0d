"""The arguments of AdaptiveMixin, and remedies expressed as arguments of AdaptiveMixin and Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtune_adaptive.errors import ConfigError, Remedy
from torchtune_adaptive.formatting import parse_size


@dataclass(frozen=True)
class AdaptiveArguments:
    """Settings of AdaptiveMixin. HfArgumentParser turns the fields into command-line options."""

    recover_from_oom: bool = field(default=True, metadata={"help": "Repeat a step that ran out of memory, in parts."})
    regrow_after: int = field(default=200, metadata={"help": "Steps without OOM before a limit grows; 0: never."})
    use_maximum_batch_size: bool = field(default=False, metadata={"help": "Measure the largest microbatch that fits."})
    token_budget: int | str | None = field(default=None, metadata={"help": "Limit in padded tokens, or auto: measure."})
    memory_limit: str | None = field(default=None, metadata={"help": "Memory limit of each rank: 24GiB or a fraction."})

    def __post_init__(self) -> None:
        for name in ("recover_from_oom", "use_maximum_batch_size"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is invalid; allowed: True or False")
        if type(self.regrow_after) is not int or self.regrow_after < 0:
            raise ConfigError(f"regrow_after: {self.regrow_after!r} is invalid; allowed: a number of steps; 0: never")
        if isinstance(self.token_budget, str) and self.token_budget.isdecimal():
            object.__setattr__(self, "token_budget", int(self.token_budget))
        number = type(self.token_budget) is int and self.token_budget > 0
        if not number and self.token_budget not in (None, "auto"):
            raise ConfigError(f"token_budget: {self.token_budget!r} is invalid; allowed: a number of tokens, or 'auto'")
        if self.token_budget is not None and self.use_maximum_batch_size:
            raise ConfigError("use_maximum_batch_size limits rows and token_budget limits tokens: set only one of them")
        if self.memory_limit is not None:
            parse_size(self.memory_limit, "memory_limit")


REMEDIES_AS_ARGUMENTS: Mapping[Remedy, str] = {
    **{remedy: remedy.value for remedy in Remedy},
    Remedy.CHECKPOINT_ACTIVATIONS: "set gradient_checkpointing=True",
    Remedy.MORE_RANKS: "shard the model over more ranks with FSDP2",
    Remedy.LARGER_BUDGET: "raise memory_limit",
    Remedy.SMALLER_LIMIT: "lower per_device_train_batch_size",
    Remedy.NO_RECOVERY: "set recover_from_oom=False",
    Remedy.RECOVERY: "set recover_from_oom=True",
    Remedy.FEWER_ROWS: "set use_maximum_batch_size=False",
    Remedy.ROOM_FOR_NCCL: "if CUDA was out of memory, leave more memory to NCCL: set memory_limit, for example to 0.9",
    Remedy.CAP_MEMORY: "set memory_limit, for example to 8GiB",
    Remedy.MEASURE: "measure on the device with use_maximum_batch_size=True",
}
"""The text of each remedy, expressed as a value of TrainingArguments or AdaptiveArguments."""
