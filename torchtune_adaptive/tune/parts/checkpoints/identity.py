"""What makes a run this run: changed, it is another one, and its checkpoints are no place to go on from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.tune.parts.checkpoints.contents import is_lora
from torchtune_adaptive.tune.parts.checkpoints.named import file_names
from torchtune_adaptive.tune.start.arguments import COMPONENT, default_of

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
PPO_KEYS = (
    "reward_and_value_model",
    "ppo_epochs",
    "ppo_batch_size",
    "max_generated_tokens",
    "temperature",
    "top_k",
    "stop_token_ids",
)
TOLD_KEYS = ("loss", "lr_scheduler", "clip_grad_norm", "dtype", "tokenizer.max_seq_len")
"""Keys that may change in the course of a run, but not without a word: they change what it trains from there on."""
TOLD_PPO_KEYS = (
    "kl_coeff",
    "gamma",
    "lmbda",
    "whiten_rewards",
    "min_response_length",
    "penalise_no_eos",
    "reward_penalty",
)
ENDS_BYTES = 2**22
LIMITS = ("tokenizer.max_seq_len",)
"""Keys that errors advise to lower when memory is short: a run may go on with less."""


def identity_of(cfg: DictConfig, recipe: str) -> dict[str, Any]:
    """The values that a run keeps for its whole life, by their dotted keys."""
    flat = _flat({"recipe": recipe, **{key: _plain(cfg, key) for key in RUN_KEYS}})
    if recipe == "full_ppo":
        flat |= _flat({key: _plain(cfg, key) for key in PPO_KEYS})
        flat |= weights_in("reference weights", cfg.get("ref_policy_checkpointer"))
        flat |= weights_in("reward weights", cfg.get("reward_checkpointer"))
    if is_lora(recipe):
        flat |= weights_in("frozen weights", cfg.get("checkpointer"))
    if recipe == "full_dpo":
        flat |= weights_in("reference weights", cfg.get("ref_checkpointer"))
    return {key: value for key, value in flat.items() if key not in LIMITS}


def told_values(cfg: DictConfig) -> dict[str, Any]:
    """The values that a run may change, and tells of, by their dotted keys."""
    return _flat({key: _plain(cfg, key) for key in (*TOLD_KEYS, *TOLD_PPO_KEYS)})


def weights_in(what: str, section: Any) -> dict[str, Any]:
    """A fingerprint of weights that are not trained: an adapter is worth nothing without those it was trained beside,
    nor a policy's loss without its reference's. By content: paths change."""
    names = section.get("checkpoint_files") if isinstance(section, DictConfig) else None
    if not isinstance(names, ListConfig | DictConfig):
        return {}
    folder = Path(str(section.get("checkpoint_dir")))
    return {f"{what} in {name}": _fingerprint(folder / name) for name in file_names(names)}


def _fingerprint(path: Path) -> str | None:
    """Size, beginning and end of a file: enough to tell two models apart, and done at once for one of any size."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        crc32 = zlib.crc32(file.read(ENDS_BYTES))
        file.seek(max(0, size - ENDS_BYTES))
        crc32 = zlib.crc32(file.read(ENDS_BYTES), crc32)
    return f"{size} bytes, CRC-32 {crc32:08x}"


def difference(configured: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """The first key whose value is not the one that the checkpoint's run had, and both values."""
    return next(iter(differences(configured, saved)), None)


def differences(configured: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Every such key, with both values."""
    pairs = ((key, _value(key, configured), _value(key, saved)) for key in sorted(configured.keys() | saved.keys()))
    return [f"{key} is {ours}, and was {theirs}" for key, ours, theirs in pairs if ours.value != theirs.value]


class _Value(NamedTuple):
    value: Any
    """As YAML would have it: a sequence is a list."""
    given: bool

    def __str__(self) -> str:
        if self.given:
            return repr(self.value)
        return "not given" if self.value is None else f"not given ({self.value!r} then)"


def _value(key: str, values: Mapping[str, Any]) -> _Value:
    """What a run has for a dotted key: where it was not given, what its component takes then."""
    if key in values:
        return _Value(values[key], given=True)
    section, _, name = key.rpartition(".")
    default = default_of(values.get(f"{section}.{COMPONENT}"), name)
    return _Value(list(default) if isinstance(default, tuple) else default, given=False)


def _plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; what is null counts as absent, as it does for torchtune."""
    if not isinstance(values, Mapping):
        return {} if values is None else {prefix.rstrip("."): values}
    return {key: value for name, part in values.items() for key, value in _flat(part, f"{prefix}{name}.").items()}
