"""Facts about third-party packages: supported versions, optional extras, and warnings that users cannot act on."""

import logging
import os
import warnings
from importlib.metadata import version
from typing import NoReturn

TORCH = "2.13 to 2.15"
PARENT_PID = os.getppid()
"""The process that started this one. Read before torch is imported, which takes seconds in which it may end."""

os.register_at_fork(after_in_child=lambda: globals().update(PARENT_PID=os.getppid()))
RECIPES_EXTRA = ("torchtune", "torchao", "torchdata", "omegaconf", "yaml", "tqdm")
"""Modules that only the [recipes] extra installs."""


def refuse_torch(why: str) -> NoReturn:
    """Raise ImportError because the installed version of torch is not supported."""
    raise ImportError(f"torch {version('torch')} does not work with torchtune-adaptive ({why}): install torch {TORCH}")


def hide_notices() -> None:
    """Filter warnings of dependencies that users cannot act on. Warnings about config or data are kept."""
    # torchao looks for compiled extensions that no recipe uses
    logging.getLogger("torchao").addFilter(lambda record: "cpp extensions" not in record.getMessage())
    # torchdata 0.11 calls a function that torch 2.13 has deprecated
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    # LoRA's adapters are initialized on a CPU mesh, for which torch has no sharded random generator
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    # torchtune's profiler enables XPU unless the config disables it
    warnings.filterwarnings("ignore", message="XPU is not available")
