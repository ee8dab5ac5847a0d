"""Rehearse a recipe without a GPU, weights or data, to predict its memory and speed.

  tune-adaptive plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Accepts the configs of torchtune and of this package for finetuning, preference training, PPO and GRPO, unchanged.
"""

from __future__ import annotations

import argparse

from torchtune_adaptive.lifecycle.console import log_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--config", required=True, metavar="NAME", help="name or path of a config, as in `tune run`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of docs/rehearsing-recipes.md")


def run(options: argparse.Namespace) -> int:
    """Print the prediction."""
    from torchtune_adaptive.rehearse_recipe.plan import print_plan  # imports torch

    log_to_stderr()
    print_plan(options.config, options.overrides)
    return 0
