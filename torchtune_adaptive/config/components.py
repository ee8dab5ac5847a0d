"""Build components from config sections that have a `_component_`. Errors name the section and the argument."""

from __future__ import annotations

import pkgutil
import re
from typing import Any

from omegaconf import DictConfig
from torchtune import config

from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import shown

COMPONENT = "_component_"
MAX_REASON_LENGTH = 500


def require(cfg: DictConfig, key: str) -> DictConfig:
    """Return the section `key` of the config. Raise a ConfigError if it is missing or not a section."""
    section = cfg.get(key)
    if section is None:
        raise ConfigError(f"{key} is missing: add a section with a _component_")
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    return section


def build(key: str, cfg: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Build the component of the section `key`."""
    return build_section(key, require(cfg, key), *args, **kwargs)


def build_section(key: str, section: object, *args: Any, **kwargs: Any) -> Any:
    """Build the component of a section. Errors name its key."""
    if isinstance(section, DictConfig) and COMPONENT in section and not isinstance(path := section[COMPONENT], str):
        # torchtune reads `model=null` as `model._component_=null`
        raise ConfigError(f"{key}.{COMPONENT} is {shown(path)}: allowed is the dotted path of a class or a function")
    try:
        return config.instantiate(section, *args, **kwargs)
    except AdaptiveError:
        raise
    except (Exception, SystemExit) as error:
        component = section.get(COMPONENT) if isinstance(section, DictConfig) else None
        described = component or f"{section} (a section with a _component_ is needed)"
        message = f"{key} could not be built from {described}: {in_a_line(error)}"
        if (cause := error.__cause__) and str(cause) not in str(error):  # for a library that wraps the actual cause
            message += f" ({in_a_line(cause)})"
        raise ConfigError(message) from error


def imported(key: str, path: str) -> Any:
    """Import and return the object at the dotted path `path`, which is the value of `key`."""
    try:
        return pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} is {path!r}, which cannot be imported: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """Return the type and the text of another library's error, in one line and shortened."""
    text = re.split(r"\. GPU \d+ has", " ".join(str(error).split()))[0].rstrip(".")  # torch's OOM errors are long
    if len(text) > MAX_REASON_LENGTH:
        text = f"{text[:MAX_REASON_LENGTH]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
