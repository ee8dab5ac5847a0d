"""Keys of `adaptive_plan`, which also takes the keys of the recipe. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.config.keys import (
    BOOL,
    COUNT,
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
    world_size: int | tuple[int, ...] = option(RANKS | SEVERAL_RANKS, 1)
    """number of ranks, or several numbers to compare, such as `[1,2,4,8]`. The command starts no other process, so any
    number works"""
    memory_limit: str | float | None = option(TEXT | NUMBER | NULL, None)
    """memory of a rank: an amount (`24GiB`, `80GB`) or a card (`h100`, `a100-40`, `4090`). null:
    `adaptive.memory_limit`, or its smallest entry if it is a list"""
    memory_overhead: str | int | None = option(TEXT | ZERO | NULL, None)
    """memory of a rank that tensors cannot use (CUDA context, NCCL, libraries). null: `3GiB`, or `1GiB` for one
    process"""
    sequence_length: int | tuple[int, ...] | None = option(TOKENS | COUNTS | NULL, None)
    """tokens of a row, or several lengths to compare, such as `[2048,8192]`. null: `adaptive.sequence_length`, else
    `tokenizer.max_seq_len`, else the smaller of 4096 and the model's maximum"""
    lengths: str | None = option(TEXT | NULL, None)
    """rehearse samples of varying lengths instead of the longest only: a median and a maximum (`512:4096`), a file with
    one number per line, or `dataset` for the lengths of the config's dataset"""
    steps: int | None = option(COUNT | NULL, None)
    """steps to rehearse after the search. null: 2, or 200 with `lengths`"""
    expandable_segments: bool | None = option(BOOL | NULL, None)
    """setting of CUDA's caching allocator. null: as in `PYTORCH_CUDA_ALLOC_CONF`, or else False"""
    format: str = option(one_of("table", "json"), "table")
    """output format. `json` has every figure, including settings that were tried and memory over the steps"""
    advise: bool | None = option(BOOL | NULL, None)
    """rehearse other settings too. null: only if the config does not fit. `True`: always. `False`: never"""

    @property
    def several_ranks(self) -> tuple[int, ...]:
        """Return the numbers of ranks without duplicates."""
        return (self.world_size,) if isinstance(self.world_size, int) else tuple(dict.fromkeys(self.world_size))
