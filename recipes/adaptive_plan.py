"""Predict the memory of a run without a GPU, weights or data, by rehearsing its recipe on fake tensors.

    tune run adaptive_plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Takes every config of the recipes for finetuning, preference training and PPO, torchtune's and ours, unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchtune_adaptive.config.command_line import name_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.forecast import advice, answer
from torchtune_adaptive.forecast.question import PLAN_KEYS, read_question
from torchtune_adaptive.forecast.rehearse_recipe import rehearse_recipe
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.entry_point import run_query

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(cfg: DictConfig, path: Path, overrides: Sequence[str]) -> None:
    """Print the predicted peak memory; raise an AdaptiveError if the config does not fit."""
    started = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    if started > 1:
        raise ConfigError(
            f"adaptive_plan is one process, but {started} were started: leave out --nproc_per_node, and add "
            f"world_size={started}"
        )
    question = read_question(cfg, name_of(path), overrides)
    as_table, answers, tried = question.plan.format == "table", [], []
    several = len([*question.each()]) > 1
    for each in question.each():
        if several or each.lengths:
            steps = f"{each.steps} steps of {each.length} tokens at most, {count_of(each.ranks, 'rank')}"
            print(f"rehearsing {steps}", file=sys.stderr, flush=True)
        answers.append(rehearse_recipe(each))
        if as_table:
            print(answer.text(answers[-1]), flush=True)
    fits = any(found.fits for found in answers)
    for found in answers if question.plan.advise or (question.plan.advise is None and not fits) else ():
        others = list(advice.advise(found.question))
        tried += others
        if as_table:
            print(advice.text(others), flush=True)
            best = next((one.found for one in others if one.found.fits), None)
            if best is not None:
                print(f"train the first with: {answer.command(best.question, best.rows)}", flush=True)
    if question.plan.format == "json":
        print(answer.as_json(answers, [one.as_row() for one in tried]))
    if not fits:
        hint = "see the settings above" if tried else "advise=True tries other settings"
        raise AdaptiveError(f"the config does not fit; {hint}")


if __name__ == "__main__":
    run_query(main, keys=PLAN_KEYS)
