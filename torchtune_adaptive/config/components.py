"""Building what a config section names with `_component_`, with errors that name the section."""

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
"""Names of arguments in a message: the rest is left to the component's documentation."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    return build_section(key, require(cfg, key), *args, **kwargs)


def build_section(key: str, section: object, *args: Any, **kwargs: Any) -> Any:
    """The object that a section describes; what goes wrong while it is built is reported under its key."""
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
        if (below := error.__cause__) and str(below) not in str(error):  # what a library has wrapped says why
            message += f" ({in_a_line(below)})"
        if component and isinstance(section, DictConfig):
            message = misfit(key, section, args, kwargs) or wrong_values(key, section) or message
        raise ConfigError(message) from error


def path_of(key: str, section: object) -> str:
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{key} is {shown(section)}: allowed is a section with a _component_")
    path = section.get(COMPONENT)
    if not isinstance(path, str):
        raise ConfigError(f"{key}.{COMPONENT} is {shown(path)}: allowed is the dotted path of a class or a function")
    return path


def misfit(key: str, section: DictConfig, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """What a component does not take of its section, or lacks; None where it can be called, or nothing can tell. `args`
    and `kwargs` are what it is given besides."""
    parameters, named = _parameters_of(section[COMPONENT]), _named(section[COMPONENT])
    if parameters is None:
        is_none = named is not None and not callable(named)
        return f"{key}.{COMPONENT} is {section[COMPONENT]!r}, which is no class or function" if is_none else None
    by_position = [one for one in parameters if one.kind in (_BY_NAME[0], inspect.Parameter.POSITIONAL_ONLY)]
    given = {*kwargs, *(one.name for one in by_position[: len(args)])}
    free = [one for one in parameters if one.kind in _BY_NAME and one.name not in given]
    known, names = [one.name for one in free], [str(name) for name in section if name != COMPONENT]
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    unknown = [] if takes_any else [name for name in names if name not in {*known, *given}]

    component = section[COMPONENT].rpartition(".")[2]
    missing = [one.name for one in free if one.default is one.empty and one.name not in names]
    problems = [f"{key}.{name} is missing: {component} requires it" for name in missing]
    allowed = f"; allowed: {', '.join(known[:MOST_NAMES])}{' ...' * (len(known) > MOST_NAMES)}" if known else ""
    for name in unknown:
        meant = nearest(name, known)
        advice = f"did you mean {meant}?" if meant else f"remove it{allowed}"
        problems.append(f"{key}.{name}: {component} has no such argument; {advice}")
    return "; ".join(problems) or None


def passed_on(section: DictConfig) -> list[str]:
    """Keys that a component which takes any hands on, to whatever knows whether they are right."""
    named = {one.name for one in _parameters_of(section[COMPONENT]) or ()}
    return [str(key) for key in section if named and key not in {COMPONENT, *named}]


def wrong_values(key: str, section: DictConfig) -> str:
    """Texts and nulls where the component wants a number or a bool; lists of another length."""
    problems = []
    for one in (one for one in _parameters_of(section[COMPONENT]) or () if one.name in section):
        annotation = one.annotation if one.annotation is not one.empty else type(one.default)
        wanted, value = inspect.formatannotation(annotation).replace("torch.", ""), section[one.name]
        takes_it = {str: r"\bstr\b", NoneType: r"\bNone\b|\bOptional\b"}.get(type(value))
        component = section[COMPONENT].rpartition(".")[2]
        if takes_it and re.search(r"\b(int|float|bool)\b", wanted) and not re.search(takes_it, wanted):
            problems.append(f"{key}.{one.name} is {shown(value)}, but {component} takes {wanted}")
        elif isinstance(one.default, tuple) and isinstance(value, ListConfig) and len(value) != len(one.default):
            problems.append(f"{key}.{one.name} is {shown(value)}, but {component} takes {len(one.default)} values")
    return "; ".join(problems)


def _parameters_of(path: str) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(_named(path), eval_str=True).parameters.values())
    except (ValueError, TypeError, NameError):
        return None


def _named(path: str) -> Any:
    """What a path names; None where that is nothing, which whoever builds it says."""
    try:
        return pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError):
        return None


def in_a_line(error: BaseException) -> str:
    """Another library's error in one line, cut where nobody would read on."""
    text = re.split(r"\. GPU \d+ has", " ".join(str(error).split()))[0].rstrip(".")  # out of memory goes on for long
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
