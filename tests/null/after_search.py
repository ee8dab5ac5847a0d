"""Train with the row counts that the recipes' searches found; write benchmarks/results/null_after_search_VERSION.json.

python -m tests.null.after_search
"""

import os
import sys
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import save
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.forecast.rehearse_recipe import Forecast, rehearse_recipe
from torchtune_adaptive.forecast.request import read_request

LENGTHS, LONGEST = "300:2048", 2048
"""Median and longest length, drawn like those of instruction data."""
STEPS = 50
RANKS = 8
CASES = tuple(
    (name, memory_gb, expandable)
    for expandable in (False, True)
    for name, memory_gb in (("llama3_2/3B_full", 24), ("llama3_1/8B_full", 80))
)


def rehearsed(name: str, memory_gb: int, given: tuple[str, ...] = (), **asked: Any) -> Forecast:
    cfg = OmegaConf.load(locate(f"adaptive/{name}"))
    assert isinstance(cfg, DictConfig)
    plan = {"world_size": RANKS, "memory_limit": f"{memory_gb}GB", "sequence_length": LONGEST, **asked}
    merged = OmegaConf.merge(cfg, OmegaConf.create(plan), OmegaConf.from_dotlist(list(given)))
    return rehearse_recipe(read_request(DictConfig(merged), name, given))


def figures(found: Forecast) -> dict[str, Any]:
    steps, errors = found.rehearsal.steps, [each for each in found.rehearsal.errors if not each["in_search"]]
    return {
        "steps": len(steps),
        "steps that flush": sum(step["flushes"] > 0 for step in steps),
        "flushes": sum(step["flushes"] for step in steps),
        "out of memory": len(errors),
        "most_reserved_bytes": max((step["reserved_bytes"] for step in steps), default=0),
    }


def main() -> int:
    rows: list[dict[str, Any]] = []

    def tell(**row: Any) -> None:
        rows.append(row)
        print(row, flush=True)
        note = f"rank 0 of {RANKS}; lengths {LENGTHS} (median:longest) or all {LONGEST}"
        save(f"null_after_search_{torch.__version__.split('+')[0]}", rows, note)

    for name, memory_gb, expandable in CASES:
        about: dict[str, Any] = {"config": name, "memory_gb": memory_gb, "expandable_segments": expandable}
        plan = {"lengths": LENGTHS, "steps": STEPS}
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        mixed = rehearsed(name, memory_gb, adaptive={"round_to": "none", "accumulation": "keep"}, **plan)
        tell(**about, what="mixed lengths, rows found", rows=mixed.rows, **figures(mixed))
        for beyond in (0, 1, 2):
            given = f"batch_size={(mixed.rows or 0) + beyond}", "gradient_accumulation_steps=1"
            longest = rehearsed(name, memory_gb, given, **{**plan, "lengths": None, "steps": 3})
            tell(**about, what=f"longest, {beyond} above", rows=longest.rows, **figures(longest))
        budget = rehearsed(name, memory_gb, adaptive={"token_budget": "auto"}, batch_size=64, **plan)
        tell(**about, what="mixed lengths, token_budget: auto", rows=64, **figures(budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
