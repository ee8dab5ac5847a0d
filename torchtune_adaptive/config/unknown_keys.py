"""Keys that nothing reads: the user's own, misspelt ones, and those of `adaptive:` in another place."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.adaptive import AdaptiveConfig
from torchtune_adaptive.config.rules import keys_of
from torchtune_adaptive.config.settings import Settings
from torchtune_adaptive.config.signatures import COMPONENT
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.wording import nearest

logger = logging.getLogger(__name__)

SECTIONS = (
    "model",
    "tokenizer",
    "dataset",
    "loss",
    "optimizer",
    "lr_scheduler",
    "checkpointer",
    "ref_checkpointer",
    "metric_logger",
    "profiler",
    "tensor_parallel_plan",
    "batch_increase_function",
)
OF_PPO = "policy_model"
MISSPELT = 0.8
"""Similarity, from 0 to 1, at which a key counts as a typo."""


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuses keys that look like misspelt ones; names the others that nothing reads in a log line."""
    if OF_PPO in cfg and OF_PPO not in more:
        raise ConfigError(
            f"{OF_PPO} is read only by the PPO recipe: run adaptive_ppo_full_finetune_distributed, or remove it"
        )
    known = {*keys_of(Settings), *SECTIONS, *more}
    unread = sorted(str(key) for key in cfg if key not in known | _referred_to(cfg))
    _check_places(cfg, unread)
    _check_adaptive(cfg, known)
    for key in unread:
        if (meant := _meant(key, known)) is not None:
            raise ConfigError(
                f"{key} is not a known key: did you mean {meant}? If it is your own key, give it a less similar name"
            )
    if unread and aloud:
        logger.info("ignored config keys: %s", ", ".join(unread))


def _check_places(cfg: DictConfig, unread: Collection[str]) -> None:
    """Refuses keys of `adaptive:` at the top of the config, or in a section, where nothing reads them.

    In a section with a _component_ they are the component's own, whose constructor refuses what is not.
    """
    ours = set(keys_of(AdaptiveConfig))
    paths = (path for key in unread for path in _paths(key, cfg._get_node(key)))
    if not (found := [path for path in paths if path.rpartition(".")[2] in ours]):
        return
    places = " and ".join(f"adaptive.{path.rpartition('.')[2]}" for path in found)
    one = len(found) == 1
    raise ConfigError(
        f"{' and '.join(found)} {'has' if one else 'have'} no effect here; did you mean {places}? "
        f"{'Rename your own key' if one else 'Rename your own keys'}"
    )


def _check_adaptive(cfg: DictConfig, known: Collection[str]) -> None:
    """Refuses keys of the recipe that stand in `adaptive:`."""
    section = cfg.get("adaptive")
    astray = [str(key) for key in section if key in known] if isinstance(section, DictConfig) else []
    astray = [key for key in astray if key not in keys_of(AdaptiveConfig)]
    if astray:
        names = " and ".join(astray)
        raise ConfigError(
            f"{' and '.join(f'adaptive.{key}' for key in astray)} {'has' if len(astray) == 1 else 'have'} no effect "
            f"here: move {names} out of adaptive"
        )


def _paths(path: str, value: object) -> Iterator[str]:
    """This key and those of its section, down to the first component, which checks its own."""
    yield path
    if isinstance(value, DictConfig) and not value._is_none() and COMPONENT not in value:
        for key in value:
            yield from _paths(f"{path}.{key!s}", value._get_node(key))


def _referred_to(cfg: DictConfig) -> set[str]:
    """Keys that other values are made from, as in `${output_dir}/logs`."""
    return set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))


def _meant(key: str, known: Collection[str]) -> str | None:
    near = nearest(key, known, MISSPELT)
    if near is None or key.startswith(f"{near}_") or key.endswith(f"_{near}"):  # ppo_batch_size is no slip
        return None
    return near
