"""What a component takes, beside what its section gives it."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.wording import nearest

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
