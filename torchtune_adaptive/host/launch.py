"""What happens around a recipe: read the config, run the four methods, end with one clear message.

config  ->  Recipe(cfg)  ->  setup()  ->  train()  ->  cleanup()
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from typing import Protocol

from omegaconf import DictConfig
from torchtune import config

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.host.configs import read_command_line

FIRST_RANK_SPEAKS_S = 3.0
"""How long the other ranks hold an error back. The first rank has most likely met the same one: it says so, ends, and
the launcher ends the others before they repeat it."""


class Recipe(Protocol):
    def __init__(self, cfg: DictConfig) -> None: ...
    def setup(self) -> None: ...
    def train(self) -> None: ...
    def cleanup(self) -> None: ...


def main(recipe_type: type[Recipe]) -> None:
    """Collective: runs a recipe as the command line says, and exits with status 1 where a user has to act."""
    show_decisions()
    try:
        cfg = read_command_line(sys.argv)
        if _rank() == 0:
            config.log_config(recipe_name=recipe_type.__name__, cfg=cfg)
        recipe = recipe_type(cfg)
        recipe.setup()
        recipe.train()
        recipe.cleanup()
    except AdaptiveError as error:
        _end_with(error)


def show_decisions() -> None:
    """Our own log lines, as plain lines on stderr. The library logs on rank 0 only."""
    logger = logging.getLogger("torchtune_adaptive")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _end_with(error: AdaptiveError) -> None:
    rank = _rank()
    if rank != 0:
        time.sleep(FIRST_RANK_SPEAKS_S)
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    where = "" if rank == 0 else f" (rank {rank})"
    print(f"\nerror{where}: {error}", file=sys.stderr, flush=True)
    sys.exit(1)


def _rank() -> int:
    """The rank as the launcher says it, which is known before there is a process group."""
    return int(os.environ.get("RANK", "0"))
