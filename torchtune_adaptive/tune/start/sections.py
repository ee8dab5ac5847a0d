"""Config sections as frozen, validated values.

This is the only module of the library that sees a DictConfig. A section is described by a frozen dataclass whose
fields carry a rule; `read` turns the section into that dataclass or raises a ConfigError that names the key, its
value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.limits.rungs import ROUNDINGS
from torchtune_adaptive.schedules.accumulation import ACCUMULATION_MODES, LR_SCALINGS
from torchtune_adaptive.schedules.growth import BEYOND_MEMORY
from torchtune_adaptive.search.strategies import STRATEGIES
from torchtune_adaptive.sizes import MemorySize, parse_sizes
from torchtune_adaptive.wording import did_you_mean, shown

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
TO_A_DAY = Rule(lambda v: NUMBER.accepts(v) and 1 <= v <= 86400, "a number of seconds from 1 to 86400, a day,")
ABOVE_ZERO = Rule(lambda v: NUMBER.accepts(v) and v > 0, "a number above 0")
TEXT = Rule(lambda v: isinstance(v, str) and v != "", "a text")
PATH = Rule(lambda v: TEXT.accepts(v) and _is_path(v), "a path of names of at most 255 bytes")
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


def _sizes(value: Any, key: str) -> tuple[MemorySize, ...] | None:
    return None if value is None else parse_sizes(value, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """The `adaptive:` section."""

    recover_from_oom: bool | None = option(
        BOOL | NULL,
        None,
        means="`True`: run a step again that ran out of memory. `False`: let it end the run. null: on wherever it is "
        "possible unasked, that is without `optimizer_in_bwd` and with `tensor_parallel_dim: 1`",
    )
    recover_untested: bool = option(
        BOOL,
        False,
        means="`True`: recovery also where it has not been tested: under tensor parallelism on anything but CPUs",
    )
    regrow_after: int = option(
        COUNT_OR_0,
        200,
        means="steps without trouble after which a size that has shrunk tries the next larger one; 0: never",
    )
    on_nan_loss: str = option(
        one_of("warn", "stop"),
        "warn",
        means="the first step whose loss, or norm of the gradient, is NaN or infinite: `warn` says so and goes on, "
        "`stop` ends the run on all ranks",
    )
    silent_rank_timeout: float | None = option(
        TO_A_DAY | Rule(NULL.accepts, "null, for never"),
        120,
        means="seconds after which the other ranks end, with its name, when one has stopped answering: a process that "
        "is stopped, a machine that hangs. One that is only busy, with a save, a compilation or its dataset, answers. "
        "null: they wait until the process group gives up",
    )
    memory_limit: tuple[MemorySize, ...] | None = option(
        SIZES,
        None,
        convert=_sizes,
        means="what a rank may use: `24GiB`, `500MiB`, `80GB`, a fraction `0.9`, or a list with one for each rank. "
        "On CUDA the allocator enforces it, on a CPU a meter does; without it a CPU has nothing to search",
    )

    token_budget: int | str | None = option(
        COUNT | one_of("auto") | NULL,
        None,
        means="microbatches by tokens, whichever samples of a step share one. A number: no microbatch has more. "
        "`auto`: as many as a few probes before training have shown to fit. null: by rows. In PPO, for each stage",
    )
    padding: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `False`: samples stand one after another, without padding, and attention sees "
        "each alone; where that is not possible, an error. `True`: rows padded to the longest, samples of like length "
        "together. null: without wherever possible, else one line says why not",
    )
    deal: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `True`: the samples of a step are dealt to the ranks by what they cost, so that "
        "none waits for the fullest; a step has the same samples as before. null: wherever that is possible, that is "
        "for models of text without tensor parallelism. `False`: each rank runs what it has read",
    )
    oversize: str = option(
        one_of("error", "truncate", "skip"),
        "error",
        means="a sample that is too long for any microbatch: an error that names it; or `truncate`, `skip` (left out "
        "of the loss); how many that were is told at the end of each epoch",
    )

    precompute_reference: bool = option(
        BOOL,
        False,
        means="preference training: ask the reference once for the whole dataset, before training, and free it. What "
        "it says is kept in `output_dir/reference` with a fingerprint of model, weights, tokenizer and dataset, and a "
        "checksum of each pair",
    )

    search: str = option(
        one_of(*STRATEGIES),
        "linear",
        means="`linear`: measure few rows, extrapolate each phase, verify. `static`: predict as `adaptive_plan` does, "
        "verify; if that fails, or nothing can be predicted, go on as `linear`. `binary`: double until it fails, then "
        "bisect. `decrease`: halve from above until it fits",
    )
    round_to: str = option(
        one_of(*ROUNDINGS),
        "power_of_two",
        means="what the answer is rounded down to: or `divisor` (of the configured samples per step), `none`",
    )
    max_batch_size: int | None = option(count_up_to(2**20) | NULL, None, means="no more rows than that; by rows only")
    sequence_length: int | None = option(
        count_up_to(MOST_TOKENS) | NULL,
        None,
        means="tokens of the worst case; null: `tokenizer.max_seq_len`, else the longest sample of the dataset "
        "(scanned once, with a progress bar)",
    )
    accumulation: str = option(
        one_of(*ACCUMULATION_MODES),
        "rebalance",
        means="`rebalance`: keep the configured samples per step, grow the step only when one microbatch already "
        "holds more. `fixed`: leave `gradient_accumulation_steps` alone. `keep`: never change the samples per step",
    )
    lr_scaling: str = option(
        one_of(*LR_SCALINGS),
        "none",
        means="what growth of the samples per step does to the learning rate: or `sqrt`, `linear`",
    )
    reuse_search: bool = option(
        BOOL,
        True,
        means="take the answer from `batch_search.json` if it was found under the same circumstances",
    )

    on_save_error: str = option(
        one_of("stop", "continue"),
        "stop",
        means="a checkpoint that cannot be written ends the run; or `continue`",
    )
    beyond_memory: str = option(
        one_of(*BEYOND_MEMORY),
        "skip",
        means="an increase beyond what fits is skipped; or `accumulate` (taken, in more microbatches), `error`",
    )


def read_adaptive(section: DictConfig | None) -> AdaptiveConfig:
    """The `adaptive:` section of a config, which may be absent; a key that is not known is an error."""
    values = _plain(section, "adaptive")
    read_known = partial(read, AdaptiveConfig, values, prefix="adaptive.")
    checks: list[Callable[[], object]] = [*(partial(_check_known, key) for key in values), read_known]
    together(checks)
    return read_known()


def _check_known(key: object) -> None:
    if key not in (known := keys_of(AdaptiveConfig)):
        hint = did_you_mean(str(key), known)
        raise ConfigError(f"adaptive.{key} is not a known key: allowed are {', '.join(known)}{hint}")


def read(kind: type[T], values: Mapping[Any, object] | DictConfig | None, prefix: str = "") -> T:
    """The dataclass `kind`, filled with the keys of `values` that it names and checked rule by rule."""
    plain = _plain(values, prefix.rstrip("."))
    options = options_of(kind)
    checked = together(partial(_checked, field, plain, prefix) for field in options)
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


def _plain(values: Any, name: str) -> Mapping[Any, object]:
    if OmegaConf.is_config(values):
        values = OmegaConf.to_container(values, resolve=True)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {values!r}: allowed is a section of keys and values")
    return values
