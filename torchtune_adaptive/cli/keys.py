"""Explain the config keys that torchtune does not have: meaning, allowed values and default.

tune-adaptive keys                 # all of them
tune-adaptive keys search memory   # those whose name contains one of these words
tune-adaptive keys adaptive_plan   # those of adaptive_plan
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from dataclasses import dataclass

from torchtune_adaptive.config.registry import PLAN
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import nearest

WIDEST = 110
"""Columns of a line, on a terminal that has more."""


@dataclass(frozen=True)
class Key:
    name: str
    allowed: str
    """Values that it takes, in words."""
    default: str
    """The value where none is given, as a config has it."""
    means: str
    recipe: str = ""
    """The recipe that alone knows it."""


INCREASE = Key(
    "batch_increase_function",
    "a section with a _component_, or a dotted path, or null",
    "null",
    "a function (epoch, batch size) -> rows to add, called before each epoch: a section with a `_component_`, or a "
    "dotted path",
)


def at_the_top() -> list[Key]:
    """Keys that stand beside torchtune's own."""
    from torchtune_adaptive.config.keys import Settings  # with numpy and omegaconf, which other commands spare

    search, *others = _keys_of(Settings)
    return [search, INCREASE, *others]


def of_the_section() -> list[Key]:
    """Keys of `adaptive:`."""
    from torchtune_adaptive.config.keys import AdaptiveConfig

    return _keys_of(AdaptiveConfig, "adaptive.")


def of_adaptive_plan() -> list[Key]:
    """Keys of what is asked of `adaptive_plan`, which stand beside those of the config that it is asked about."""
    from torchtune_adaptive.forecast.keys import PlanSettings

    return _keys_of(PlanSettings, recipe=PLAN.name)


def _keys_of(section: type, prefix: str = "", recipe: str = "") -> list[Key]:
    from torchtune_adaptive.config.keys import meanings_of, options_of

    means = meanings_of(section)
    return [
        Key(
            prefix + field.name,
            field.metadata["rule"].allowed,
            "null" if field.default is None else str(field.default),
            means[field.name],
            recipe,
        )
        for field in options_of(section)
        if field.name in means
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="word", help="show only keys whose name contains one of these words"
    )


def run(options: argparse.Namespace) -> int:
    words, every_key = options.words, [*at_the_top(), *of_the_section(), *of_adaptive_plan()]
    chosen = [key for key in every_key if not words or any(word in key.name or word == key.recipe for word in words)]
    if not chosen:
        raise ConfigError(f"no key matches {' or '.join(words)}{_hint(words[0], every_key)}")
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns)
    print("\n\n".join(explained(key, width) for key in chosen))
    return 0


def _hint(word: str, keys: list[Key]) -> str:
    """The keys that are called almost like this, or have such a word in their name."""
    names = {key.name: {key.name, key.name.removeprefix("adaptive."), *re.split(r"[._]", key.name)} for key in keys}
    near = nearest(word, set().union(*names.values()))
    meant = [name for name, parts in names.items() if near in parts]
    return f"; did you mean {' or '.join(meant)}?" if meant else "; run without words to list all"


def explained(key: Key, width: int) -> str:
    alone = f"   ({key.recipe} only)" if key.recipe else ""
    first, *others = (f"{key.name}: {key.default}{alone}", f"allowed: {key.allowed}", key.means)
    indented = (textwrap.wrap(line, width, initial_indent="    ", subsequent_indent="    ") for line in others)
    wrapped = textwrap.wrap(first, width, subsequent_indent="    ")
    return "\n".join([*wrapped, *(line for lines in indented for line in lines)])
