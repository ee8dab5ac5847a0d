"""A program: reads a run's config and budget from stdin, and prints how many rows are predicted to fit."""

from __future__ import annotations

import json
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.prediction.capacity import Budget, Capacity
from torchtune_adaptive.tune.config.remedies import in_keys
from torchtune_adaptive.tune.trace.laws import law_of
from torchtune_adaptive.tune.trace.steps import fake_steps
from torchtune_adaptive.tune.trace.which_recipe import trains_with_ppo


def most_rows(cfg: dict[str, object], *args: Any, whole_step_rows: int | None, **options: Any) -> int:
    """As a search of this stage would find: beside gradients of an earlier microbatch, unless a step is one."""
    config = OmegaConf.create(cfg)
    if not config.get("optimizer_in_bwd") and not trains_with_ppo(config):
        if whole_step_rows is not None:
            alone = OmegaConf.create({**cfg, "gradient_accumulation_steps": 1, "use_maximum_batch_size": False})
            if (rows := _most_rows(alone, *args, **options)) >= whole_step_rows:
                return rows
        config.gradient_accumulation_steps = max(2, config.gradient_accumulation_steps)
    return _most_rows(config, *args, **options)


def _most_rows(
    config: DictConfig, world_size: int, tokens: int, budget_bytes: int, stage: str = "", fallen_back: bool = False
) -> int:
    """The law is not checked against another trace: the search measures its answer."""
    with fake_steps(config, world_size) as steps:
        tokens -= steps[stage].rows.answer_tokens
        if fallen_back and (change := steps[stage].fall_back) is not None:
            change()
        law = law_of(steps[stage], tokens, traced=lambda: None)
    return Capacity(law, tokens, Budget(budget_bytes, overhead_bytes=0), rungs=()).most_rows


if __name__ == "__main__":
    try:
        print(most_rows(**json.load(sys.stdin)))
    except AdaptiveError as error:
        sys.exit(in_keys(error))
