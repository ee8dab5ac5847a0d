"""Config sections as frozen, validated values.

A section is described by a frozen dataclass whose fields carry a rule; `read` turns the section into that dataclass
or raises a ConfigError that names the key, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError

from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.wording import shown

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value may be: a test, and the same in words."""

    accepts: Callable[[Any], bool]
    allowed: str

    def __or__(self, other: Rule) -> Rule:
        return Rule(lambda v: self.accepts(v) or other.accepts(v), f"{self.allowed} or {other.allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_path(text: str) -> bool:
    """Whether Linux lets a file have that name; what nothing checks ends in an OSError wherever it is looked at."""
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return b"\0" not in raw and len(raw) < 4096 and all(len(name) <= 255 for name in raw.split(b"/"))


BOOL = Rule(lambda v: isinstance(v, bool), "True or False")
COUNT = Rule(lambda v: _is_int(v) and v >= 1, "a whole number of at least 1")
INTEGER = Rule(_is_int, "a whole number")
COUNT_OR_0 = Rule(lambda v: _is_int(v) and v >= 0, "a whole number of at least 0")
NULL = Rule(lambda v: v is None, "null")
NUMBER = Rule(lambda v: _is_int(v) or isinstance(v, float), "a number")
TO_A_DAY = Rule(lambda v: NUMBER.accepts(v) and 1 <= v <= 86400, "a number of seconds from 1 to 86400 (one day),")
ABOVE_ZERO = Rule(lambda v: NUMBER.accepts(v) and v > 0, "a number above 0")
TEXT = Rule(lambda v: isinstance(v, str) and v != "", "a string")
PATH = Rule(lambda v: TEXT.accepts(v) and _is_path(v), "a path whose names have at most 255 bytes each")
SIZES = Rule(lambda v: True, "an amount, a fraction up to 1, or a list of those; or null")
"""What is wrong with one is told where it is converted."""
SECTION = Rule(lambda v: True, "a section of keys and values")
"""What is wrong with one is told where it is read."""
NAMES = Rule(lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v), "a list of names")


MOST_TOKENS = 2**24
"""Tokens of a row: what no model takes is refused before lists of that length are made."""


def one_of(*choices: object) -> Rule:
    return Rule(lambda v: v in choices, " or ".join(map(str, choices)))


def count_up_to(most: int) -> Rule:
    return Rule(lambda v: COUNT.accepts(v) and v <= most, f"a whole number from 1 to {most}")


def counts_up_to(most: int) -> Rule:
    each = count_up_to(most)
    return Rule(
        lambda v: isinstance(v, list) and bool(v) and all(map(each.accepts, v)),
        f"a list of whole numbers from 1 to {most}",
    )


def some_of(*choices: str) -> Rule:
    return Rule(lambda v: NAMES.accepts(v) and v and set(v) <= set(choices), f"a list of {', '.join(choices)}")


def option(
    rule: Rule,
    default: object = dataclasses.MISSING,
    *,
    means: str = "",
    convert: Callable[[Any, str], object] | None = None,
) -> Any:
    """A field of a section; required when it has no default.

    `means` is what docs/keys.md and `tune-adaptive keys` say of it; torchtune's own keys have none.
    `convert` takes the value and what errors call it.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "means": means, "convert": convert or _frozen})


def _frozen(value: object, key: str) -> object:
    return tuple(value) if isinstance(value, list) else value


def read(kind: type[T], values: Mapping[Any, object] | DictConfig | None, prefix: str = "") -> T:
    """The dataclass `kind`, filled with the keys of `values` that it names and checked rule by rule."""
    given = plain(values, prefix.rstrip("."))
    options = options_of(kind)
    checked = together(partial(_checked, field, given, prefix) for field in options)
    return kind(**{field.name: value for field, value in zip(options, checked, strict=True)})


def keys_of(kind: type) -> list[str]:
    return [field.name for field in options_of(kind)]


def options_of(kind: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if "rule" in field.metadata]


def _checked(field: dataclasses.Field[Any], values: Mapping[Any, object], prefix: str) -> object:
    rule: Rule = field.metadata["rule"]
    key = prefix + field.name
    if field.name not in values:
        if field.default is dataclasses.MISSING:
            raise ConfigError(f"{key} is missing: give {rule.allowed}")
        return field.default
    value = values[field.name]
    check(rule, value, key)
    return field.metadata["convert"](value, key)


def check(rule: Rule, value: object, key: str) -> None:
    if not rule.accepts(value):
        raise ConfigError(f"{key} is {shown(value)}: allowed is {rule.allowed}")


def value_at(cfg: DictConfig, key: str) -> Any:
    """The value of a dotted key; None where there is none, or no section that could have it."""
    try:
        return OmegaConf.select(cfg, key)
    except ConfigTypeError:
        return None


def plain(values: Any, name: str) -> Mapping[Any, object]:
    if OmegaConf.is_config(values):
        values = OmegaConf.to_container(values, resolve=True)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {values!r}: allowed is a section of keys and values")
    return values
