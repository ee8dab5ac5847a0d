"""Building what a config section names with `_component_`, with errors that name the section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig
from torchtune import config

from torchtune_adaptive.config.adaptive import AdaptiveConfig
from torchtune_adaptive.config.rules import keys_of
from torchtune_adaptive.config.signatures import COMPONENT, misfit
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.wording import shown

LONGEST_REASON = 500


def require(cfg: DictConfig, key: str) -> DictConfig:
    """The section `key` of the config, which must be there."""
    section = require_parts(cfg, key)
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    return section


def require_parts(cfg: DictConfig, key: str) -> DictConfig | ListConfig:
    """The section `key` of the config, which must be there, or the list of sections that stands in its place."""
    section = cfg.get(key)
    if section is None:
        raise ConfigError(f"{key} is missing: give a section with a _component_")
    if not isinstance(section, DictConfig | ListConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    return section


def build(key: str, cfg: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """The object that section `key` of the config describes."""
    return build_section(key, require(cfg, key), *args, **kwargs)


def build_section(key: str, section: object, *args: Any, **kwargs: Any) -> Any:
    """The object that a section describes; what goes wrong while it is built is reported under its key."""
    _check_path(key, section)
    try:
        return config.instantiate(section, *args, **kwargs)
    except AdaptiveError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(_what_is_wrong(key, section, error, args, kwargs)) from error


def _check_path(key: str, section: object) -> None:
    """Refuses `model=null` and the like, which torchtune reads as `model._component_=null`."""
    if isinstance(section, DictConfig) and COMPONENT in section:
        path_of(key, section)


def path_of(key: str, section: object) -> str:
    path = section.get(COMPONENT) if isinstance(section, DictConfig) else None
    if not isinstance(path, str):
        raise ConfigError(f"{key}.{COMPONENT} is {shown(path)}: allowed is the dotted path of a class or a function")
    return path


def _what_is_wrong(
    key: str, section: object, error: BaseException, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    if isinstance(error, TypeError) and isinstance(section, DictConfig):
        if told := misfit_in_words(key, section, args, kwargs):
            return told
        named = [name for name in map(str, section) if f"'{name}'" in str(error)]
        also = _misplaced(named) or _left_over(key, named, error)
        return f"{key} could not be built from {_described(section)}: {in_a_line(error)}{also}"
    return f"{key} could not be built from {_described(section)}: {in_a_line(error)}"


def misfit_in_words(key: str, section: DictConfig, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """What a component is given that it does not take, or lacks; None where it can be called, or nothing can tell."""
    wrong = misfit(section, args, kwargs)
    if wrong is None:
        return None
    return f"{wrong.in_words(key, section[COMPONENT].rpartition('.')[2])}{_misplaced(wrong.unknown)}"


def _misplaced(names: Sequence[str]) -> str:
    """Where a key of `adaptive:` belongs that a component was given and did not know."""
    ours = [key for key in keys_of(AdaptiveConfig) if key in names]
    return "".join(f"; the key of this package is adaptive.{name}" for name in ours)


def _left_over(key: str, names: Sequence[str], error: BaseException) -> str:
    """What a component has handed on to another one, which does not take it: a key of the component before it, say."""
    unexpected = "unexpected keyword argument" in str(error)
    return "".join(f"; remove {key}.{name} (~{key}.{name} on the command line)" for name in names if unexpected)


def _described(section: object) -> str:
    component = section.get(COMPONENT) if isinstance(section, DictConfig) else None
    return str(component) if component else f"{section} (a section with a _component_ is needed)"


def in_a_line(error: BaseException) -> str:
    """Another library's error in one line, cut where nobody would read on."""
    text = " ".join(str(error).split()).rstrip(".")
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
