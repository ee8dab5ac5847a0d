"""The arguments of `adaptive(...)`, for trainers of other libraries."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import parse_size


@dataclass(frozen=True)
class AdaptiveArguments:
    """Settings of an adaptive Trainer or worker. HfArgumentParser turns the fields into command-line options."""

    recover_from_oom: bool = field(default=True, metadata={"help": "Repeat a step that ran out of memory, in parts."})
    regrow_after: int = field(default=200, metadata={"help": "Steps without OOM before a limit grows; 0: never."})
    use_maximum_batch_size: bool = field(default=False, metadata={"help": "Measure the largest microbatch that fits."})
    token_budget: int | str | None = field(default=None, metadata={"help": "Limit in padded tokens, or auto: measure."})
    memory_limit: str | None = field(default=None, metadata={"help": "Memory limit of each rank: 24GiB or a fraction."})

    def changed(self, **arguments: Any) -> Self:
        """Return a copy with these arguments of `adaptive()`. Raise ConfigError for unknown ones."""
        names = [each.name for each in fields(self) if each.init]
        if unknown := arguments.keys() - set(names):
            raise ConfigError(f"adaptive() got an unknown argument {sorted(unknown)[0]!r}; allowed: {', '.join(names)}")
        return replace(self, **arguments)

    @property
    def searches(self) -> bool:
        """True if the sizes of microbatches are measured."""
        return self.use_maximum_batch_size or self.token_budget == "auto"

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
