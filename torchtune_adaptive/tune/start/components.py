"""Building what a config section names with `_component_`, with errors that name the section."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.tune.start.sections import AdaptiveConfig

LONGEST_REASON = 500


def require(cfg: DictConfig, key: str) -> Any:
    """The section `key` of the config, which must be there."""
    section = cfg.get(key)
    if section is None:
        raise ConfigError(f"{key} is missing: give a section with a _component_")
    if not OmegaConf.is_config(section):
        raise ConfigError(f"{key} is {section!r}: allowed is a section with a _component_")
    return section


def build(key: str, cfg: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """The object that section `key` of the config describes."""
    return build_section(key, require(cfg, key), *args, **kwargs)


def build_section(key: str, section: Any, *args: Any, **kwargs: Any) -> Any:
    """The object that a section describes; what goes wrong while it is built is reported under its key."""
    try:
        return config.instantiate(section, *args, **kwargs)
    except AdaptiveError:
        raise
    except (Exception, SystemExit) as error:
        because = f"{reason(error)}{_misplaced(section, error)}"
        raise ConfigError(f"{key} could not be built from {_described(section)}: {because}") from error


def _misplaced(section: Any, error: BaseException) -> str:
    """Where a key of `adaptive:` belongs that a component was given and did not know."""
    if not isinstance(section, DictConfig) or not isinstance(error, TypeError):
        return ""
    ours = [field.name for field in dataclasses.fields(AdaptiveConfig)]
    names = [name for name in ours if name in section and f"'{name}'" in str(error)]
    return "".join(f"; if that of this package is meant, write adaptive.{name}" for name in names)


def _described(section: Any) -> str:
    component = section.get("_component_") if isinstance(section, DictConfig) else None
    return str(component) if component else f"{section} (a section with a _component_ is needed)"


def reason(error: BaseException) -> str:
    """Another library's error in one line, cut where nobody would read on."""
    text = " ".join(str(error).split()).rstrip(".")
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
