"""What is asked of `adaptive_plan`, and its keys; nothing here waits for torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from torchtune_adaptive.tune.config.rules import (
    BOOL,
    COUNT_OR_0,
    MOST_TOKENS,
    NULL,
    NUMBER,
    TEXT,
    Rule,
    count_up_to,
    counts_up_to,
    one_of,
    option,
)

TOKENS = count_up_to(MOST_TOKENS)
COUNTS = counts_up_to(MOST_TOKENS)
MOST_RANKS = 65_536
RANKS = count_up_to(MOST_RANKS)
SEVERAL_RANKS = counts_up_to(MOST_RANKS)
ZERO = Rule(lambda v: COUNT_OR_0.accepts(v) and v == 0, "0")


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    world_size: int | tuple[int, ...] = option(
        RANKS | SEVERAL_RANKS,
        1,
        means="ranks, on any number of machines: none of them is started, and more of them take no longer; or several "
        "numbers to compare, each traced by itself: `[1,2,4,8]`",
    )
    memory_limit: str | float | None = option(
        TEXT | NUMBER | NULL,
        None,
        means="what a rank has: an amount (`24GiB`, `80GB`) or a card (`h100`, `a100-40`, `4090`). null: "
        "`adaptive.memory_limit`, of a list the smallest",
    )
    memory_overhead: str | int | None = option(
        TEXT | ZERO | NULL,
        None,
        means="of it, what is not for tensors: CUDA's context, NCCL, libraries; or `0`. null: `3GiB`, in one process "
        "`1GiB`, on a CPU nothing",
    )
    sequence_length: int | tuple[int, ...] | None = option(
        TOKENS | COUNTS | NULL,
        None,
        means="tokens of a row, or several lengths: `[2048,8192]`; where the loss takes logits in chunks, rounded up "
        "to a multiple of their number. null: `adaptive.sequence_length`, else "
        "`tokenizer.max_seq_len`, else 4096 or the most that the model takes",
    )
    expandable_segments: bool | None = option(
        BOOL | NULL,
        None,
        means="how CUDA's caching allocator will be set; null: as `PYTORCH_CUDA_ALLOC_CONF` says here, else False",
    )
    format: str = option(
        one_of("table", "json"),
        "table",
        means="of the answer; `json` has all of it, with the commands that measure it and the error of the check "
        "(`largest_error`)",
    )
    advise: bool | None = option(
        BOOL | NULL,
        None,
        means="`True`: which settings are fastest. null: where not even one row fits, which settings would. `False`: "
        "neither",
    )
    link_bandwidth: str | None = option(
        TEXT | NULL,
        None,
        means="bytes a second, between ranks, in one direction: `50GB`. null: the card's; between machines `50GB`",
    )
    picture: str | None = option(
        TEXT | NULL,
        None,
        means="a file to draw what fits into, for example `plan.png`",
    )

    @property
    def ranks(self) -> int:
        """The ranks of an answer, which is for one number of them."""
        return self.several_ranks[0]

    @property
    def several_ranks(self) -> tuple[int, ...]:
        """Each number of ranks that is asked about, once."""
        return (self.world_size,) if isinstance(self.world_size, int) else tuple(dict.fromkeys(self.world_size))


@dataclass(frozen=True)
class Question:
    """A config, what is asked about it, and the command line that asks."""

    cfg: DictConfig
    plan: PlanSettings
    config_name: str
    given: Sequence[str] = ()
    """Everything else on the command line."""

    def on(self, ranks: int) -> Question:
        """The question for one number of ranks."""
        return replace(self, plan=replace(self.plan, world_size=ranks))
