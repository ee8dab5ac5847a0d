"""What happens around a recipe: read the config, run the four methods, end with one clear message.

config  ->  Recipe(cfg)  ->  setup()  ->  train()  ->  cleanup()
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Protocol

from omegaconf import DictConfig
from torchtune import config

from torchtune_adaptive.errors import AdaptiveError, RunFinished, UnrecoverableError
from torchtune_adaptive.tune.start.configs import read_command_line
from torchtune_adaptive.tune.start.early_exit import refusing_early_exits
from torchtune_adaptive.tune.start.keys import check_keys

logger = logging.getLogger(__name__)

FIRST_WORD_S = 10.0
"""How long an error is held back that another rank may explain better: it ends first, and the launcher then ends the
others before they add to its message."""


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
        check_keys(cfg, aloud=_rank() == 0)
        if _rank() == 0:
            config.log_config(recipe_name=recipe_type.__name__, cfg=cfg)
        with refusing_early_exits():
            recipe = recipe_type(cfg)
            recipe.setup()
            recipe.train()
            recipe.cleanup()
    except RunFinished as finished:
        if _rank() == 0:
            logger.info("%s", finished)
    except AdaptiveError as error:
        if _rank() != 0 or isinstance(error, UnrecoverableError):  # rank 0 has most likely met the same error
            _let_peers_speak_first()
        _end_with(error)
    except Exception:
        _let_peers_speak_first()  # a connection that breaks is what a rank sees of a peer that has ended
        raise


def answer(question: Callable[[DictConfig], None], keys: Collection[str]) -> None:
    """Runs what trains nothing, in one process, as the command line says; `keys` are those beside a recipe's."""
    show_decisions()
    try:
        cfg = read_command_line(sys.argv)
        check_keys(cfg, keys, aloud=True)
        question(cfg)
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
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    where = "" if rank == 0 else f" (rank {rank})"
    print(f"\nerror{where}: {error}", file=sys.stderr, flush=True)
    # what was only half built complains when it is collected
    sys.unraisablehook = lambda _: None
    sys.exit(1)


def _let_peers_speak_first() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(FIRST_WORD_S)


def _rank() -> int:
    """The rank as the launcher says it, which is known before there is a process group."""
    return int(os.environ.get("RANK", "0"))
