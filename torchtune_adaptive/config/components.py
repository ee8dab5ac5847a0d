"""Building what a config section names with `_component_`, with errors that name the section."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig
from torchtune import config

from torchtune_adaptive.config.keys import AdaptiveConfig, keys_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.text import nearest, shown

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


COMPONENT = "_component_"
MOST_NAMES = 12
"""Names of arguments in a message: the rest is left to the component's documentation."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Misfit:
    """The keys that keep a component from being called with its section."""

    unknown: Sequence[str]
    missing: Sequence[str]
    known: Sequence[str]
    """What a section may give."""

    def in_words(self, key: str, component: str) -> str:
        parts = [f"{key}.{name} is missing: {component} requires it" for name in self.missing]
        if self.unknown:
            names, one = ", ".join(f"{key}.{name}" for name in self.unknown), len(self.unknown) == 1
            advice = self._advice("it" if one else "them")
            parts.append(f"{names}: {component} has no such argument{'s' * (not one)}; {advice}")
        return "; ".join(parts)

    def _advice(self, them: str) -> str:
        meant = [nearest(name, self.known) for name in self.unknown]
        if all(meant):
            return f"did you mean {', '.join(filter(None, meant))}?"
        if not self.known:
            return f"remove {them}"
        more = " ..." if len(self.known) > MOST_NAMES else ""
        return f"remove {them}; allowed: {', '.join(self.known[:MOST_NAMES])}{more}"


def misfit(section: DictConfig, args: Sequence[object], kwargs: Mapping[str, object]) -> Misfit | None:
    """What of a section its component does not take, or lacks; None where that fits, or nothing can tell.

    `args` and `kwargs` are what the component is given besides.
    """
    parameters = _parameters_of(section[COMPONENT])
    if parameters is None:
        return None
    by_position = [each for each in parameters if each.kind in (_BY_NAME[0], inspect.Parameter.POSITIONAL_ONLY)]
    given = {*kwargs, *(each.name for each in by_position[: len(args)])}
    free = [each for each in parameters if each.kind in _BY_NAME and each.name not in given]
    known, keys = [each.name for each in free], [str(key) for key in section if key != COMPONENT]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    unknown = [] if takes_any else [key for key in keys if key not in {*known, *given}]
    missing = [each.name for each in free if each.default is each.empty and each.name not in keys]
    return Misfit(unknown, missing, known) if unknown or missing else None


def default_of(component: object, name: str) -> object:
    """What a component takes for an argument that it is not given; None, too, where nothing can tell."""
    found = {each.name: each.default for each in _parameters_of(component) or ()}.get(name)
    return None if found is inspect.Parameter.empty else found


def _parameters_of(component: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(pkgutil.resolve_name(component)).parameters.values())
    except (ValueError, TypeError, ImportError, AttributeError):
        return None
