"""What makes a run this run: changed, it is another one, and its checkpoints are no place to go on from."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.errors import ConfigError

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
ROLLOUT_KEYS = (
    "reward_and_value_model",
    "reward_model",
    "ppo_epochs",
    "ppo_batch_size",
    "grpo_samples",
    "resample_groups",
    "max_generated_tokens",
    "temperature",
    "top_k",
    "stop_token_ids",
)
MAY_BE_LOWERED = "tokenizer.max_seq_len"
"""Errors advise to lower it when memory is short: a run may go on with less."""
NOT_TRAINED = {
    "full_ppo": {"reference weights": "ref_policy_checkpointer", "reward weights": "reward_checkpointer"},
    "full_dpo": {"reference weights": "ref_checkpointer"},
    "lora": {"frozen weights": "checkpointer"},
    "lora_dpo": {"frozen weights": "checkpointer"},
    "full_grpo": {"reference weights": "ref_checkpointer", "reward weights": "reward_checkpointer"},
    "lora_grpo": {"frozen weights": "checkpointer", "reward weights": "reward_checkpointer"},
}
"""Recipe -> weights that a run of it depends on and does not train, and the section that names their files."""
CONTENT_OF = "content of "
"""Before the path of a data file, in the key of a fingerprint."""
MOST_SHOWN = 3
ENDS_BYTES = 2**22
"""Bytes that are read at either end of a file, to tell it from another of its size; of several files, in all."""


def saves_adapters(recipe: str) -> bool:
    """Whether a recipe trains adapters: a checkpoint of one is no place to go on from for another."""
    return recipe.startswith("lora")


def identity_of(cfg: DictConfig, recipe: str) -> dict[str, object]:
    """The values that a run keeps for its whole life, by their dotted keys. Reads files: for rank 0."""
    on_rollouts = recipe.endswith(("_ppo", "_grpo"))
    values = {key: value_at(cfg, key) for key in (*RUN_KEYS, *(ROLLOUT_KEYS if on_rollouts else ()))}
    plain = {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in values.items()
    }
    flat = _flat({"recipe": recipe, **plain})
    for whose, section in NOT_TRAINED.get(recipe, {}).items():
        flat |= weights_in(whose, cfg.get(section))
    files = {text: _files_named(text) for text in _strings_in(plain["dataset"])}
    flat |= {f"{CONTENT_OF}{text}": _fingerprint(named) for text, named in files.items() if named}
    flat.pop(MAY_BE_LOWERED, None)
    if recipe == "full_ppo":  # there it only says how a step is split
        flat.pop("gradient_accumulation_steps", None)
    return flat


def weights_in(whose: str, section: Any) -> dict[str, object]:
    """A fingerprint of weights that are not trained. By content: paths change."""
    names = section.get("checkpoint_files") if isinstance(section, DictConfig) else None
    if not isinstance(names, ListConfig | DictConfig):
        return {}
    folder = Path(str(section.get("checkpoint_dir")))
    paths = {name: folder / name for name in file_names(names)}
    return {
        f"{whose} in {name}": _fingerprint([path]) if os.path.isfile(path) else "missing"
        for name, path in paths.items()
    }


def file_names(value: object, key: str = "checkpointer") -> list[str]:
    """The names in `checkpoint_files`: a list, or torchtune's short form for many of them."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if isinstance(plain, list) and plain:
        return [str(name) for name in plain]
    if isinstance(plain, dict) and {"filename_format", "max_filename"} <= plain.keys():
        last = str(plain["max_filename"])
        numbers = (str(number).zfill(len(last)) for number in range(1, int(last) + 1))
        return [str(plain["filename_format"]).format(number, last) for number in numbers]
    raise ConfigError(f"{key}.checkpoint_files is {plain!r}: allowed is a list of names")


def difference(configured: Mapping[str, object], saved: Mapping[str, object]) -> str | None:
    """The keys whose values are not those that the checkpoint's run had, and both. Of another recipe, only that."""
    another_recipe = configured.get("recipe") != saved.get("recipe")
    changed = []
    for key in ["recipe"] if another_recipe else sorted(configured.keys() | saved.keys()):
        is_gone = key.startswith(CONTENT_OF) and not (key in configured and key in saved)  # a data file says so itself
        if configured.get(key) != saved.get(key) and not is_gone:
            ours, theirs = (repr(values[key]) if key in values else "not set" for values in (configured, saved))
            changed.append(f"{key} is {ours}, but was {theirs}")
    if len(changed) > MOST_SHOWN:
        changed[MOST_SHOWN:] = [f"{len(changed) - MOST_SHOWN} more differ"]
    return ", and ".join(changed) or None


def _files_named(text: str) -> list[Path]:
    """The files that a text names: one, those of a pattern, or a folder's own, if there is a slash in its name."""
    path = text.removeprefix("file://")
    pattern = f"{path}/*" if "/" in path and os.path.isdir(path) else path  # of a prompt, which is no path, it is False
    return sorted(Path(found) for found in glob(pattern) if os.path.isfile(found))


def _fingerprint(files: Sequence[Path]) -> str:
    """Size of all, and a checksum of the two ends of each: the more files, the less of each is read."""
    whole, crc32, ends = 0, 0, ENDS_BYTES // len(files)
    for path in files:
        size = path.stat().st_size
        whole += size
        with path.open("rb") as file:
            crc32 = zlib.crc32(file.read(ends), crc32)
            file.seek(max(file.tell(), size - ends))
            crc32 = zlib.crc32(file.read(), crc32)
    return f"{whole} bytes, CRC-32 {crc32:08x}"


def _strings_in(values: object) -> set[str]:
    """All texts of a section, among them the names of data files."""
    if isinstance(values, Mapping | list):
        parts = values.values() if isinstance(values, Mapping) else values
        return {text for part in parts for text in _strings_in(part)}
    return {values} if isinstance(values, str) else set()


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys; what is null counts as absent, as it does for torchtune."""
    if not isinstance(values, Mapping):
        return {} if values is None else {prefix.rstrip("."): values}
    return {key: value for name, part in values.items() for key, value in _flat(part, f"{prefix}{name}.").items()}
