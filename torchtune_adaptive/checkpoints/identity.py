"""What makes a run this run: changed, it is another one, and its checkpoints are no place to go on from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
MAY_BE_LOWERED = ("tokenizer.max_seq_len",)
"""Keys that errors advise to lower when memory is short: a run may go on with less."""
WEIGHTS_IN = " weights in "
"""Between whose weights they are and their file, in the key of a fingerprint."""
CONTENT_OF = "content of "
"""Before the path of a data file, in the key of a fingerprint."""
MOST_SHOWN = 3
"""Changed keys that a message names."""
ENDS_BYTES = 2**22
"""Bytes that are read at either end of a file, to tell it from another of its size."""


def identity_of(cfg: DictConfig, recipe: str) -> dict[str, object]:
    """The values that a run keeps for its whole life, by their dotted keys. Reads files: for rank 0."""
    keys = (*RUN_KEYS, *(PPO_RUN_KEYS if recipe == "full_ppo" else ()))
    flat = _flat({"recipe": recipe, **{key: _plain(cfg, key) for key in keys}})
    if recipe == "full_ppo":
        flat |= weights_in("reference weights", cfg.get("ref_policy_checkpointer"))
        flat |= weights_in("reward weights", cfg.get("reward_checkpointer"))
    if saves_adapters(recipe):
        flat |= weights_in("frozen weights", cfg.get("checkpointer"))
    if recipe == "full_dpo":
        flat |= weights_in("reference weights", cfg.get("ref_checkpointer"))
    files = {name: _fingerprint(Path(name)) for name in _strings_in(_plain(cfg, "dataset"))}
    flat |= {f"{CONTENT_OF}{name}": content for name, content in files.items() if content is not None}
    return {key: value for key, value in flat.items() if key not in MAY_BE_LOWERED}


def _strings_in(values: object) -> set[str]:
    """All texts of a section, among them the names of data files."""
    if isinstance(values, Mapping | list):
        parts = values.values() if isinstance(values, Mapping) else values
        return {text for part in parts for text in _strings_in(part)}
    return {values} if isinstance(values, str) else set()


def weights_in(what: str, section: Any) -> dict[str, object]:
    """A fingerprint of weights that are not trained: an adapter is worth nothing without those it was trained beside,
    nor a policy's loss without its reference's. By content: paths change."""
    names = section.get("checkpoint_files") if isinstance(section, DictConfig) else None
    if not isinstance(names, ListConfig | DictConfig):
        return {}
    folder = Path(str(section.get("checkpoint_dir")))
    return {f"{what} in {name}": _fingerprint(folder / name) for name in file_names(names)}


def _fingerprint(path: Path) -> str | None:
    """Size and checksum of a file's two ends."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        crc32 = zlib.crc32(file.read(ENDS_BYTES))
        file.seek(max(file.tell(), size - ENDS_BYTES))
        return f"{size} bytes, CRC-32 {zlib.crc32(file.read(), crc32):08x}"


def difference(configured: Mapping[str, object], saved: Mapping[str, object]) -> str | None:
    """The keys whose values are not those that the checkpoint's run had, and both values; weights by their files, and
    by their contents where these have one name. Another recipe is all that there is to say."""
    changed = []
    keys = (configured.keys() | saved.keys()) - ONLY_SPLIT.get(str(configured.get("recipe")), set())
    for key in sorted(keys, key=lambda key: (key != "recipe", key)):
        ours, theirs = _value(key, configured), _value(key, saved)
        if ours == theirs or (key.startswith(CONTENT_OF) and None in (ours, theirs)):  # files that are gone say so
            continue
        whose, are_weights, _ = key.partition(WEIGHTS_IN)
        if not are_weights:
            changed.append(f"{key} is {_shown(key, configured)}, but was {_shown(key, saved)}")
        elif key in configured and key in saved:
            changed.append(f"{key} are {ours or 'missing'}, but were {theirs or 'missing'}")
        else:
            files = (_files_of(whose, values) for values in (configured, saved))
            changed.append("{} weights are read from {}, but were read from {}".format(whose, *files))
        if key == "recipe":
            break
    if len(changed) > MOST_SHOWN:
        changed[MOST_SHOWN:] = [f"{len(changed) - MOST_SHOWN} more differ"]
    return ", and ".join(dict.fromkeys(changed)) or None


def _value(key: str, values: Mapping[str, object]) -> object:
    """What a run has for a dotted key: where it was not given, what its component takes then."""
    if key in values:
        return values[key]
    section, _, name = key.rpartition(".")
    default = default_of(values.get(f"{section}.{COMPONENT}"), name)
    return list(default) if isinstance(default, tuple) else default  # as YAML would have it


def _shown(key: str, values: Mapping[str, object]) -> str:
    value = _value(key, values)
    if key in values:
        return repr(value)
    return "not set" if value is None else f"not set (default {value!r})"


def _files_of(whose: str, values: Mapping[str, object]) -> str:
    beginning = f"{whose}{WEIGHTS_IN}"
    names = [key.removeprefix(beginning) for key in values if key.startswith(beginning)]
    return ", ".join(names) or "no file"


def _plain(cfg: DictConfig, key: str) -> object:
    value = value_at(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys; what is null counts as absent, as it does for torchtune."""
    if not isinstance(values, Mapping):
        return {} if values is None else {prefix.rstrip("."): values}
    return {key: value for name, part in values.items() for key, value in _flat(part, f"{prefix}{name}.").items()}
