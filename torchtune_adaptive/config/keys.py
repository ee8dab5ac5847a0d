"""The keys of the config: allowed values, defaults and meanings; and remedies in errors, expressed as keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError

from torchtune_adaptive.engine.limits import ROUNDINGS
from torchtune_adaptive.engine.search import STRATEGIES
from torchtune_adaptive.errors import ConfigError, Remedy, refuse, run_checks
from torchtune_adaptive.formatting import MemorySize, did_you_mean, parse_sizes, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """The values that a key allows: `accepts` checks a value, and `allowed` describes the values in messages."""

    accepts: Callable[[Any], bool]
    allowed: str

    def __or__(self, other: Rule) -> Rule:
        return Rule(lambda v: self.accepts(v) or other.accepts(v), f"{self.allowed} or {other.allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


BOOL = Rule(lambda v: isinstance(v, bool), "True or False")
COUNT = Rule(lambda v: _is_int(v) and v >= 1, "a whole number of at least 1")
INTEGER = Rule(_is_int, "a whole number")
COUNT_OR_0 = Rule(lambda v: _is_int(v) and v >= 0, "a whole number of at least 0")
SEED = Rule(lambda v: COUNT_OR_0.accepts(v) and v < 2**32 - 2**16, f"a whole number from 0 to {2**32 - 2**16 - 1}")
"""Every rank adds its number to the seed, and the sum must have 32 bits."""
NULL = Rule(lambda v: v is None, "null")
NUMBER = Rule(lambda v: _is_int(v) or isinstance(v, float), "a number")
ABOVE_ZERO = Rule(lambda v: NUMBER.accepts(v) and v > 0, "a number above 0")
TEXT = Rule(lambda v: isinstance(v, str) and v != "", "a string")
PATH = Rule(lambda v: TEXT.accepts(v) and "\0" not in v, "a path")
SIZES = Rule(lambda v: True, "an amount, a fraction up to 1, or a list of those; or null")
"""`parse_sizes` reports invalid values."""
SECTION = Rule(lambda v: True, "a section of keys and values")
"""`read_section` reports invalid values."""
NAMES = Rule(lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v), "a list of names")


MOST_TOKENS = 2**24
"""The largest allowed number of tokens of a row, so that no list of a much larger length is created by mistake."""


def one_of(*choices: object) -> Rule:
    """Allow these values."""
    return Rule(lambda v: v in choices, " or ".join(map(str, choices)))


def count_up_to(most: int) -> Rule:
    """Allow whole numbers from 1 to `most`."""
    return Rule(lambda v: COUNT.accepts(v) and v <= most, f"a whole number from 1 to {most}")


def some_of(*choices: str) -> Rule:
    """Allow lists of these names."""
    return Rule(lambda v: NAMES.accepts(v) and v and set(v) <= set(choices), f"a list of {', '.join(choices)}")


def setting(rule: Rule, default: object = MISSING, *, convert: Callable[[Any, str], object] | None = None) -> Any:
    """Declare a field of a dataclass as a config key; without a default, the key is required.

    `convert` returns the field's value, given the value in the config and the name of the key for errors. The string
    below a field is the text of the key in docs/keys.md. Keys that torchtune also has need no such string.
    """
    return field(default=default, metadata={"rule": rule, "convert": convert or _frozen})


def _frozen(value: object, key: str) -> object:
    return tuple(value) if isinstance(value, list) else value


def read(kind: type[T], section: Mapping[Any, object] | DictConfig | None, prefix: str = "") -> T:
    """Check the values of `section` by their rules, and return them as an instance of the dataclass `kind`."""
    values = plain(section, prefix.rstrip("."))
    options = declared_settings(kind)
    checked = run_checks(partial(_checked, option, values, prefix) for option in options)
    return kind(**{option.name: value for option, value in zip(options, checked, strict=True)})


def keys_of(kind: type) -> list[str]:
    """Return the keys that the dataclass `kind` declares."""
    return [option.name for option in declared_settings(kind)]


def declared_settings(kind: type) -> list[Field[Any]]:
    """Return the fields of the dataclass `kind` that `setting` has declared."""
    return [field for field in fields(kind) if "rule" in field.metadata]


def _checked(option: Field[Any], values: Mapping[Any, object], prefix: str) -> object:
    rule, key = option.metadata["rule"], prefix + option.name
    if option.name not in values:
        if option.default is MISSING:
            raise ConfigError(f"{key} is missing: set it to {rule.allowed}")
        return option.default
    value = values[option.name]
    check(rule, value, key)
    return None if value is option.default is None else option.metadata["convert"](value, key)


def check(rule: Rule, value: object, key: str) -> None:
    """Raise ConfigError if the rule does not allow the value."""
    if not rule.accepts(value):
        raise ConfigError(f"{key} is {shown(value)}: allowed is {rule.allowed}")


def value_at(cfg: DictConfig, key: str) -> Any:
    """Return the value of a dotted key, or None if the key or its section is missing."""
    try:
        return OmegaConf.select(cfg, key)
    except ConfigTypeError:
        return None


def flat(value: object, key: str = "") -> dict[str, object]:
    """Return the values of nested sections and lists by dotted key, such as `dataset[0].source`, without nulls."""
    if isinstance(value, Mapping):
        parts = {f"{key}.{name}" if key else str(name): part for name, part in value.items()}
    elif isinstance(value, list):
        parts = {f"{key}[{at}]": part for at, part in enumerate(value)}
    else:
        return {} if value is None else {key: value}
    return {name: each for at, part in parts.items() for name, each in flat(part, at).items()}


def plain(section: Any, name: str) -> Mapping[Any, object]:
    """Return a section as a mapping, which is empty if the section is missing. `name` is its key in errors."""
    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} is {section!r}: allowed is a section of keys and values")
    return section


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """The `adaptive:` section."""

    recover_from_oom: bool = setting(BOOL, True)
    """repeat a step in smaller microbatches after any rank runs out of memory; not possible with `optimizer_in_bwd`.
    `False`: end the run instead"""
    regrow_after: int = setting(COUNT_OR_0, 200)
    """raise a reduced limit by one size after this many steps without an out-of-memory error or a flush of the
    allocator's cache. 0: never raise it"""
    memory_limit: tuple[MemorySize, ...] | None = setting(SIZES, None, convert=parse_sizes)
    """memory that a rank may use: an amount (`24GiB`, `500MiB`, `80GB`), a fraction of the device (`0.9`), or a list
    with one value per rank. On a GPU the CUDA allocator enforces the limit; on a CPU a meter does. A search on a CPU
    needs a limit"""

    token_budget: int | str | None = setting(COUNT | one_of("auto") | NULL, None)
    """limit microbatches by tokens instead of rows. A number: the maximum tokens of a microbatch. `auto`: measure the
    maximum at several lengths. null: limit by rows. In PPO, each stage has its own limit"""
    padding: bool = setting(BOOL, False)
    """under a token budget, `False`: pack samples without padding and mask attention per sample, where model and device
    support it; otherwise the log gives the reason. `True`: pad rows to the longest and group samples of similar
    length"""
    balance: bool = setting(BOOL, True)
    """under a token budget, `True`: distribute the samples of a step over the ranks by cost, to balance the work, where
    possible (text models without tensor parallelism or packed data). `False`: each rank runs the samples that it has
    read"""

    search: str = setting(one_of(*STRATEGIES), "linear")
    """how `use_maximum_batch_size` finds the limit. `linear`: measure a few sizes, extrapolate, verify. `binary`:
    double until a size fails, then bisect. `decrease`: halve until a size fits"""
    round_to: str = setting(one_of(*ROUNDINGS), "power_of_two")
    """`power_of_two`: round the result of a search down to a power of two. `none`: do not round"""
    max_batch_size: int | None = setting(count_up_to(2**20) | NULL, None)
    """upper bound, in rows, for a search or a batch increase. It cannot be combined with a token budget"""
    sequence_length: int | None = setting(count_up_to(MOST_TOKENS) | NULL, None)
    """length in tokens of the samples that a search measures with, at most `tokenizer.max_seq_len`. null:
    `tokenizer.max_seq_len`, or else the longest sample, for which the whole dataset is read"""
    accumulation: str = setting(one_of("rebalance", "fixed", "keep"), "rebalance")
    """how a search changes the samples per step. `rebalance`: keep the configured number, unless a microbatch can hold
    more. `fixed`: keep `gradient_accumulation_steps`, so that the step grows with the microbatch. `keep`: never change
    the samples per step"""


def read_section(kind: type[T], section: Mapping[Any, object] | DictConfig | None, name: str) -> T:
    """Read a section like `read`, but raise ConfigError for unknown keys. The section may be missing."""
    values, known = plain(section, name), keys_of(kind)
    refuse(
        f"{name}.{key} is not a known key; allowed: {', '.join(known)}{did_you_mean(str(key), known)}"
        for key in values
        if key not in known
    )
    return read(kind, values, prefix=f"{name}.")


AUTO = "auto"
COMPONENT_KEYS = {"tokenizer.max_seq_len": COUNT | NULL, "checkpointer.output_dir": TEXT | NULL}
"""Keys of components that are checked here, because the components report invalid values late or misleadingly."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Keys that all recipes have, with torchtune's names and defaults."""

    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}), repr=False, compare=False)
    """The config from which the settings were read, with the sections of components."""

    device: str = setting(TEXT)
    dtype: str = setting(one_of("bf16", "fp32"))
    output_dir: str = setting(PATH)
    seed: int | None = setting(SEED | NULL, None)
    cudnn_deterministic_mode: str | int | None = setting(one_of("default", "warn", "error", 0, 1, 2) | NULL, None)

    batch_size: int = setting(COUNT)
    use_maximum_batch_size: bool = setting(BOOL, False)
    """find the largest microbatch, in rows, that fits, and train with it"""
    gradient_accumulation_steps: int = setting(COUNT)
    epochs: int = setting(count_up_to(100_000))
    max_steps_per_epoch: int | None = setting(COUNT | NULL, None)
    shuffle: bool = setting(BOOL)
    collate_fn: str = setting(TEXT, "torchtune.data.padded_collate_sft")
    run_val_every_n_steps: int | None = setting(COUNT | NULL, None)
    """compute `val_loss`, the loss on all of `dataset_val`, every N steps. `dataset_val` is a section like `dataset`.
    null: never"""
    batch_size_val: int | None = setting(COUNT | NULL, None)
    """rows of a microbatch in validation. null: as many as training uses at that time"""
    clip_grad_norm: float | str | None = setting(ABOVE_ZERO | one_of("inf") | NULL, None)
    compile: bool = setting(BOOL, False)

    resume_from_checkpoint: bool | str = setting(one_of(False, AUTO), False)
    """`auto`: resume from the newest complete checkpoint in `output_dir`, or start if it has none"""
    save_every_n_steps: int | None = setting(COUNT | NULL, None)
    """save a checkpoint every N steps, in addition to the one at the end of each epoch"""
    keep_last_n_checkpoints: int | None = setting(COUNT | NULL, None)
    """keep the newest N checkpoints and remove older ones. The last checkpoint of a finished run is always kept"""
    enable_async_checkpointing: bool = setting(BOOL, False)
    save_adapter_weights_only: bool = setting(BOOL, False)

    enable_activation_checkpointing: bool = setting(BOOL, False)
    enable_activation_offloading: bool = setting(BOOL, False)
    ac_mode: str | None = setting(one_of("full", "selective") | NULL, None)
    ac_option: int | None = setting(COUNT | NULL, None)
    optimizer_in_bwd: bool = setting(BOOL, False)

    custom_sharded_layers: tuple[str, ...] | None = setting(NAMES | NULL, None)
    fsdp_cpu_offload: bool = setting(BOOL, False)
    fsdp_reshard_after_forward: bool = setting(BOOL, True)
    tensor_parallel_dim: int = setting(COUNT, 1)
    data_parallel_replicate_dim: int = setting(COUNT, 1)
    """number of model replicas (hybrid sharding). Each replica is sharded over consecutive ranks. Set it to the number
    of nodes, so that only gradients travel between nodes, once per step"""
    data_parallel_shard_dim: int | None = setting(COUNT | one_of(-1) | NULL, -1)
    """number of ranks that share a replica. -1 or null: all remaining ranks"""

    log_every_n_steps: int = setting(COUNT, 1)
    log_peak_memory_stats: bool = setting(BOOL, False)

    adaptive: AdaptiveConfig = setting(SECTION, AdaptiveConfig(), convert=partial(read_section, AdaptiveConfig))

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples that a rank trains in one step."""
        return self.batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Keys in the section of a LoRA model, which the recipe needs to save adapters."""

    lora_attn_modules: tuple[str, ...] = setting(some_of(*PROJECTIONS))
    apply_lora_to_mlp: bool = setting(BOOL)
    apply_lora_to_output: bool = setting(BOOL, False)
    lora_rank: int = setting(COUNT)
    lora_alpha: float = setting(ABOVE_ZERO)


REMEDIES: Mapping[Remedy, str] = {
    Remedy.SHORTER_SAMPLES: "lower tokenizer.max_seq_len (and adaptive.sequence_length if set)",
    Remedy.CHECKPOINT_ACTIVATIONS: "set enable_activation_checkpointing: True",
    Remedy.MORE_RANKS: "train on more ranks",
    Remedy.LARGER_BUDGET: "raise adaptive.memory_limit if it is set",
    Remedy.SMALLER_LIMIT: "lower batch_size",
    Remedy.LESS_STATE: Remedy.LESS_STATE.value,
    Remedy.NO_RECOVERY: "set adaptive.recover_from_oom: False",
    Remedy.RECOVERY: "remove adaptive.recover_from_oom: False",
    Remedy.FEWER_ROWS: "lower adaptive.max_batch_size",
    Remedy.MEASURING_STRATEGY: "set adaptive.search to linear",
    Remedy.ROOM_FOR_NCCL: (
        "if CUDA was out of memory, leave more memory to NCCL: lower adaptive.memory_limit (for example, to 0.9) or "
        "batch_size"
    ),
    Remedy.CAP_MEMORY: "set adaptive.memory_limit, for example to 8GiB",
}
"""The texts of remedies in errors, expressed as config keys."""


def read_common(cfg: DictConfig) -> Settings:
    """Read the settings that all recipes have."""
    of_components = (partial(check, rule, value_at(cfg, key), key) for key, rule in COMPONENT_KEYS.items())
    settings: Settings = run_checks([partial(read, Settings, cfg), *of_components])[0]
    return replace(settings, config=cfg)
