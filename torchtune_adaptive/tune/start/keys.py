"""Keys that nothing reads: the user's own, misspelt ones, and those of `adaptive:` in another place."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings

logger = logging.getLogger(__name__)

SECTIONS = (
    "model",
    "tokenizer",
    "dataset",
    "loss",
    "optimizer",
    "lr_scheduler",
    "checkpointer",
    "metric_logger",
    "profiler",
    "tensor_parallel_plan",
    "batch_increase_function",
    "adaptive",
)
COMPONENT = "_component_"
MISSPELT = 0.8
"""The similarity, up to 1, from which one name is taken for the other misspelt."""


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuses keys that look like misspelt ones; names the others that nothing reads in a log line."""
    known = {*(field.name for field in dataclasses.fields(Settings)), *SECTIONS, *more}
    unread = sorted(str(key) for key in cfg if key not in known | _referred_to(cfg))
    _check_places(cfg, unread)
    for key in unread:
        if (meant := _meant(key, known)) is not None:
            raise ConfigError(f"{key} is not a known key: did you mean {meant}? A key of your own needs another name")
    if unread and aloud:
        logger.info("of no effect here, since nothing reads them: %s", ", ".join(unread))


def _check_places(cfg: DictConfig, unread: Collection[str]) -> None:
    """Refuses a key of `adaptive:` at the top of the config, or in a section, where nothing reads it.

    In a section with a _component_ it is the component's own, whose constructor refuses it if it is not.
    """
    ours = {field.name for field in dataclasses.fields(AdaptiveConfig)}
    for key in unread:
        for path in _paths(key, cfg._get_node(key)):
            if (name := path.rpartition(".")[2]) in ours:
                raise ConfigError(
                    f"{path} is read by nothing: write adaptive.{name} if that is meant; a key of your own needs "
                    "another name"
                )


def _paths(path: str, value: Any) -> Iterator[str]:
    """This key and those of its section, down to the first component, which checks its own."""
    yield path
    if isinstance(value, DictConfig) and not value._is_none() and COMPONENT not in value:
        for key in value:
            yield from _paths(f"{path}.{key!s}", value._get_node(key))


def _referred_to(cfg: DictConfig) -> set[str]:
    """Keys that other values are made from, as in `${output_dir}/logs`."""
    return set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))


def _meant(key: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(key, known, n=1, cutoff=MISSPELT)
    if not near or key.startswith(f"{near[0]}_") or key.endswith(f"_{near[0]}"):  # ppo_batch_size is no slip
        return None
    return near[0]
