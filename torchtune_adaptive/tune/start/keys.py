"""Keys at the top of a config that nothing reads: the user's own, or misspelt ones."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.start.settings import Settings

logger = logging.getLogger(__name__)

SECTIONS = (
    *("model", "tokenizer", "dataset", "loss", "optimizer", "lr_scheduler", "checkpointer", "metric_logger"),
    *("profiler", "tensor_parallel_plan", "batch_increase_function", "adaptive"),
)
MISSPELT = 0.8
"""How alike two names are, of 1, before one is taken for a slip in the other."""


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuses keys that look like a slip in one that is read; of others that nothing reads it tells."""
    known = {*(field.name for field in dataclasses.fields(Settings)), *SECTIONS, *more}
    unread = sorted(str(key) for key in cfg if key not in known | _referred_to(cfg))
    for key in unread:
        if (meant := _meant(key, known)) is not None:
            raise ConfigError(f"{key} is not a known key: did you mean {meant}? A key of your own needs another name")
    if unread and aloud:
        logger.info("of no effect here, since nothing reads them: %s", ", ".join(unread))


def _referred_to(cfg: DictConfig) -> set[str]:
    """Keys that other values are made from, as in `${output_dir}/logs`."""
    return set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))


def _meant(key: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(key, known, n=1, cutoff=MISSPELT)
    if not near or key.startswith(f"{near[0]}_") or key.endswith(f"_{near[0]}"):  # ppo_batch_size is no slip
        return None
    return near[0]
