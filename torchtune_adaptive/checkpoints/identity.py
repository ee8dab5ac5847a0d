"""What makes a run this run: changed, it is another one, and its checkpoints are no place to go on from."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.checkpoints.contents import saves_adapters
from torchtune_adaptive.checkpoints.named import file_names
from torchtune_adaptive.config.components import COMPONENT, default_of
from torchtune_adaptive.config.keys import value_at

RUN_KEYS = (
    "model",
    "tokenizer",
    "dataset",
    "shuffle",
    "seed",
    "batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "optimizer_in_bwd",
)
PPO_RUN_KEYS = (
    "reward_and_value_model",
    "ppo_epochs",
    "ppo_batch_size",
    "max_generated_tokens",
    "temperature",
    "top_k",
    "stop_token_ids",
)
ONLY_SPLIT = {"full_ppo": {"gradient_accumulation_steps"}}
"""Keys among them that in a recipe only say how a step is split: they are saved all the same, and may change."""
WEIGHTS_IN = " weights in "
"""Between whose weights they are and their file, in the key of a fingerprint."""
WHOLE_BYTES = 2**26
"""Up to here a file of weights is read from end to end, of a larger one its ends and strips between them."""
ENDS_BYTES = 2**22
STRIPS, STRIP_BYTES = 4096, 2**12
MAY_BE_LOWERED = ("tokenizer.max_seq_len",)
"""Keys that errors advise to lower when memory is short: a run may go on with less."""


def identity_of(cfg: DictConfig, recipe: str) -> dict[str, object]:
    """The values that a run keeps for its whole life, by their dotted keys."""
    flat = _flat({"recipe": recipe, **{key: _plain(cfg, key) for key in RUN_KEYS}})
    if recipe == "full_ppo":
        flat |= _flat({key: _plain(cfg, key) for key in PPO_RUN_KEYS})
        flat |= weights_in("reference weights", cfg.get("ref_policy_checkpointer"))
        flat |= weights_in("reward weights", cfg.get("reward_checkpointer"))
    if saves_adapters(recipe):
        flat |= weights_in("frozen weights", cfg.get("checkpointer"))
    if recipe == "full_dpo":
        flat |= weights_in("reference weights", cfg.get("ref_checkpointer"))
    return {key: value for key, value in flat.items() if key not in MAY_BE_LOWERED}


def weights_in(what: str, section: Any) -> dict[str, object]:
    """A fingerprint of weights that are not trained: an adapter is worth nothing without those it was trained beside,
    nor a policy's loss without its reference's. By content: paths change."""
    names = section.get("checkpoint_files") if isinstance(section, DictConfig) else None
    if not isinstance(names, ListConfig | DictConfig):
        return {}
    folder = Path(str(section.get("checkpoint_dir")))
    return {f"{what} in {name}": _fingerprint(folder / name) for name in file_names(names)}


def _fingerprint(path: Path) -> str | None:
    """Size and checksum of a file: of its ends, and of all or parts of what lies between them."""
    if not path.is_file():
        return None
    size, crc32 = path.stat().st_size, 0
    with path.open("rb") as file:
        for offset, length in [(0, ENDS_BYTES), (max(0, size - ENDS_BYTES), ENDS_BYTES), *_spans(size)]:
            file.seek(offset)
            crc32 = zlib.crc32(file.read(length), crc32)
    return f"{size} bytes, CRC-32 {crc32:08x}"


def _spans(size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what is read: all of the file, or strips of it, a 4096th of its size apart. A matrix of a
    large model does not fit between two of them, though a norm may."""
    if size <= WHOLE_BYTES:
        return ((start, ENDS_BYTES) for start in range(0, size, ENDS_BYTES))
    return ((size * strip // STRIPS, STRIP_BYTES) for strip in range(STRIPS))


def difference(configured: Mapping[str, object], saved: Mapping[str, object]) -> str | None:
    """The first key whose value is not the one that the checkpoint's run had, and both values; weights by their files,
    and by their contents where these have one name."""
    keys = (configured.keys() | saved.keys()) - ONLY_SPLIT.get(str(configured.get("recipe")), set())
    for key in sorted(keys, key=lambda key: (key != "recipe", key)):
        ours, theirs = _value(key, configured), _value(key, saved)
        if ours.value != theirs.value:
            return _told(key, ours, theirs, configured, saved)
    return None


def _told(
    key: str, ours: _Configured, theirs: _Configured, configured: Mapping[str, object], saved: Mapping[str, object]
) -> str:
    whose, are_weights, _ = key.partition(WEIGHTS_IN)
    if not are_weights:
        return f"{key} is {ours}, but was {theirs}"
    if ours.given and theirs.given:
        return f"{key} are {ours.value or 'missing'}, but were {theirs.value or 'missing'}"
    return f"{whose} weights are read from {_files(whose, configured)}, but were read from {_files(whose, saved)}"


def _files(whose: str, values: Mapping[str, object]) -> str:
    beginning = f"{whose}{WEIGHTS_IN}"
    names = [key.removeprefix(beginning) for key in values if key.startswith(beginning)]
    return ", ".join(names) or "no file"


class _Configured(NamedTuple):
    value: object
    """As YAML would have it: a sequence is a list."""
    given: bool

    def __str__(self) -> str:
        if self.given:
            return repr(self.value)
        return "not set" if self.value is None else f"not set (default {self.value!r})"


def _value(key: str, values: Mapping[str, object]) -> _Configured:
    """What a run has for a dotted key: where it was not given, what its component takes then."""
    if key in values:
        return _Configured(values[key], given=True)
    section, _, name = key.rpartition(".")
    default = default_of(values.get(f"{section}.{COMPONENT}"), name)
    return _Configured(list(default) if isinstance(default, tuple) else default, given=False)


def _plain(cfg: DictConfig, key: str) -> object:
    value = value_at(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys; what is null counts as absent, as it does for torchtune."""
    if not isinstance(values, Mapping):
        return {} if values is None else {prefix.rstrip("."): values}
    return {key: value for name, part in values.items() for key, value in _flat(part, f"{prefix}{name}.").items()}
