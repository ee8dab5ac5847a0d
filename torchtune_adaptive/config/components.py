"""Build components from config sections with a `_component_`. Errors name the section and the argument."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from omegaconf import DictConfig, ListConfig
from torchtune import config

from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import nearest, shown

COMPONENT = "_component_"
LONGEST_REASON = 500
MOST_NAMES = 12
"""Argument names in a message."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def require(cfg: DictConfig, key: str) -> DictConfig:
    """Return the section `key` of the config."""
    section = require_parts(cfg, key)
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    return section


def require_parts(cfg: DictConfig, key: str) -> DictConfig | ListConfig:
    """Return the section `key` of the config, which may be a list of sections."""
    section = cfg.get(key)
    if section is None:
        raise ConfigError(f"{key} is missing: add a section with a _component_")
    if not isinstance(section, DictConfig | ListConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    return section


def build(key: str, cfg: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Build the component of the section `key`."""
    return build_section(key, require(cfg, key), *args, **kwargs)


def build_section(key: str, section: object, *args: Any, **kwargs: Any) -> Any:
    """Build the component of a section. Errors name its key."""
    if isinstance(section, DictConfig) and COMPONENT in section:
        path_of(key, section)  # torchtune reads `model=null` as `model._component_=null`
    try:
        return config.instantiate(section, *args, **kwargs)
    except AdaptiveError:
        raise
    except (Exception, SystemExit) as error:
        component = section.get(COMPONENT) if isinstance(section, DictConfig) else None
        described = component or f"{section} (a section with a _component_ is needed)"
        message = f"{key} could not be built from {described}: {in_a_line(error)}"
        if (below := error.__cause__) and str(below) not in str(error):  # a library may wrap the actual cause
            message += f" ({in_a_line(below)})"
        if component and isinstance(section, DictConfig):
            message = argument_error(key, section, args, kwargs) or value_error(key, section) or message
        raise ConfigError(message) from error


def path_of(key: str, section: object) -> str:
    """Return the `_component_` of a section."""
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    path = section.get(COMPONENT)
    if not isinstance(path, str):
        raise ConfigError(f"{key}.{COMPONENT} is {shown(path)}: allowed is the dotted path of a class or a function")
    return path


def argument_error(key: str, section: DictConfig, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """Describe arguments that the component rejects or lacks; return None if they are valid or unknown.

    `args` and `kwargs` are passed in addition to the section.
    """
    parameters, component = _parameters_of(section[COMPONENT]), _resolved(section[COMPONENT])
    if parameters is None:
        is_wrong = component is not None and not callable(component)
        return f"{key}.{COMPONENT} is {section[COMPONENT]!r}, which is not a class or function" if is_wrong else None
    by_position = [one for one in parameters if one.kind in (_BY_NAME[0], inspect.Parameter.POSITIONAL_ONLY)]
    given = {*kwargs, *(one.name for one in by_position[: len(args)])}
    free = [one for one in parameters if one.kind in _BY_NAME and one.name not in given]
    known, names = [one.name for one in free], [str(name) for name in section if name != COMPONENT]
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    unknown = [] if takes_any else [name for name in names if name not in {*known, *given}]

    name_of_component = section[COMPONENT].rpartition(".")[2]
    missing = [one.name for one in free if one.default is one.empty and one.name not in names]
    problems = [f"{key}.{name} is missing: {name_of_component} requires it" for name in missing]
    allowed = f"; allowed: {', '.join(known[:MOST_NAMES])}{' ...' * (len(known) > MOST_NAMES)}" if known else ""
    for name in unknown:
        meant = nearest(name, known)
        advice = f"did you mean {meant}?" if meant else f"remove it{allowed}"
        problems.append(f"{key}.{name}: {name_of_component} has no such argument; {advice}")
    return "; ".join(problems) or None


def value_error(key: str, section: DictConfig) -> str:
    """Describe strings and nulls in place of a number or bool, and lists of a wrong length."""
    problems = []
    for one in (one for one in _parameters_of(section[COMPONENT]) or () if one.name in section):
        annotation = one.annotation if one.annotation is not one.empty else type(one.default)
        expected, value = inspect.formatannotation(annotation).replace("torch.", ""), section[one.name]
        accepted = {str: r"\bstr\b", NoneType: r"\bNone\b|\bOptional\b"}.get(type(value))
        component = section[COMPONENT].rpartition(".")[2]
        if accepted and re.search(r"\b(int|float|bool)\b", expected) and not re.search(accepted, expected):
            problems.append(f"{key}.{one.name} is {shown(value)}, but {component} takes {expected}")
        elif isinstance(one.default, tuple) and isinstance(value, ListConfig) and len(value) != len(one.default):
            problems.append(f"{key}.{one.name} is {shown(value)}, but {component} takes {len(one.default)} values")
    return "; ".join(problems)


def _parameters_of(path: str) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(_resolved(path), eval_str=True).parameters.values())
    except (ValueError, TypeError, NameError):
        return None


def _resolved(path: str) -> Any:
    """Return the object at a dotted path, or None if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError):
        return None


def in_a_line(error: BaseException) -> str:
    """Return an error of another library in one line, shortened."""
    text = re.split(r"\. GPU \d+ has", " ".join(str(error).split()))[0].rstrip(".")  # torch's OOM errors are long
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
