"""Find the checkpoint from which a Trainer resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.errors import ConfigError

logger = logging.getLogger(__name__)


def newest_complete(args: Any, *, required: bool) -> str | None:
    """Collective: return the newest checkpoint that is complete on all ranks. If there is none, raise a ConfigError or,
    unless one is `required`, return None."""
    folder = Path(args.output_dir)
    names = from_all_ranks({path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")})
    for step in sorted({int(name) for name in set().union(*names) if name.isdecimal()}, reverse=True):
        path = folder / f"checkpoint-{step}"
        if all(from_all_ranks(is_complete(path))):
            return str(path)
        if rank() == 0:
            logger.warning("%s is skipped: its save was interrupted", path)
    if not required:
        return None
    raise ConfigError(
        f"{folder} contains no complete checkpoint to resume from: pass 'auto' instead of True to start from the "
        "beginning in this case, or the path of a checkpoint, which is not checked"
    )


def is_complete(folder: Path) -> bool:
    """Return True if the file that Trainer writes last, and all random states in the folder, are readable.

    Trainer without AdaptiveMixin may write the last file before every rank has written its random state. Files are not
    synced, so they may be truncated. AdaptiveMixin deletes the last file before a checkpoint is overwritten.
    """
    try:
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return False
    return all(map(is_zipfile, folder.glob("rng_state*.pth")))
