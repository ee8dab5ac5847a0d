"""Explain the config keys that torchtune does not have: meaning, allowed values and default.

tune-adaptive keys                 # all of them
tune-adaptive keys search memory   # those whose name contains one of these words
tune-adaptive keys adaptive_plan   # those of adaptive_plan
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Sequence

from torchtune_adaptive.config.registry import PLAN
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import did_you_mean

WIDEST = 110
"""Columns of a line, on a terminal that has more."""


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    allowed: str
    """Values that it takes, in words."""
    default: str
    """The value where none is given, as a config has it."""
    means: str
    of: str = ""
    """The recipe that alone knows it."""


INCREASE = Key(
    "batch_increase_function",
    "a section with a _component_, or a dotted path, or null",
    "null",
    "a function (epoch, batch size) -> rows to add, called before each epoch: a section with a `_component_`, or a "
    "dotted path",
)


def at_the_top() -> tuple[Key, ...]:
    """Keys that stand beside torchtune's own."""
    from torchtune_adaptive.config.keys import Settings  # with numpy and omegaconf, which other commands spare

    search, *others = _keys_of(Settings)
    return search, INCREASE, *others


def of_the_section() -> tuple[Key, ...]:
    """Keys of `adaptive:`."""
    from torchtune_adaptive.config.keys import AdaptiveConfig

    return _keys_of(AdaptiveConfig, "adaptive.")


def of_adaptive_plan() -> tuple[Key, ...]:
    """Keys of what is asked of `adaptive_plan`, which stand beside those of the config that it is asked about."""
    from torchtune_adaptive.forecast.keys import PlanSettings

    return tuple(dataclasses.replace(key, of=PLAN.name) for key in _keys_of(PlanSettings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="word", help="show only keys whose name contains one of these words"
    )


def run(options: argparse.Namespace) -> int:
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns)
    print("\n\n".join(explained(key, width) for key in chosen(options.words)))
    return 0


def chosen(words: Sequence[str]) -> list[Key]:
    everything = (*at_the_top(), *of_the_section(), *of_adaptive_plan())
    found = [key for key in everything if not words or any(word in key.name or word == key.of for word in words)]
    if not found:
        hint = did_you_mean(words[0], [key.name for key in everything], likeness=0.4)
        raise ConfigError(f"no key matches {' or '.join(words)}{hint or '; run without words to list all'}")
    return found


def explained(key: Key, width: int) -> str:
    alone = f"   ({key.of} only)" if key.of else ""
    lines = [f"{key.name}: {key.default}{alone}", f"allowed: {key.allowed}", key.means]
    first, *others = (
        textwrap.wrap(line, width, initial_indent="    " * bool(at), subsequent_indent="    ")
        for at, line in enumerate(lines)
    )
    return "\n".join([*first, *(line for wrapped in others for line in wrapped)])


def _keys_of(section: type, prefix: str = "") -> tuple[Key, ...]:
    from torchtune_adaptive.config.keys import meanings_of, options_of

    means = meanings_of(section)
    return tuple(
        Key(prefix + field.name, field.metadata["rule"].allowed, written(field.default), means[field.name])
        for field in options_of(section)
        if field.name in means
    )


def written(value: object) -> str:
    return "null" if value is None else str(value)
