"""The identity of a run: the config values that must not change when the run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.keys import flat

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
    "reward_and_value_model",
    "ppo_epochs",
    "ppo_batch_size",
    "max_generated_tokens",
    "temperature",
    "top_k",
    "stop_token_ids",
)
MAY_BE_LOWERED = "tokenizer.max_seq_len"
"""May change, because out-of-memory errors advise to lower it."""


def identity_of(cfg: DictConfig, recipe: str) -> dict[str, object]:
    """Return the values that must not change, by dotted key."""
    plain = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    values = flat({"recipe": recipe, **{key: plain.get(key) for key in RUN_KEYS}})
    values.pop(MAY_BE_LOWERED, None)
    if recipe == "full_ppo":  # PPO uses this key only to split a step into microbatches
        values.pop("gradient_accumulation_steps", None)
    return cast(dict[str, object], json.loads(json.dumps(values, default=str)))  # as in a manifest


def difference(current: Mapping[str, object], saved: Mapping[str, object]) -> str | None:
    """Describe the keys that differ, with both values, or return None. If the recipe differs, ignore other keys."""
    current, saved = flat(current), flat(saved)  # a manifest may have lists
    another_recipe = current.get("recipe") != saved.get("recipe")
    changed = []
    for key in ["recipe"] if another_recipe else sorted(current.keys() | saved.keys()):
        now, before = (repr(values[key]) if key in values else "not set" for values in (current, saved))
        if now != before and current.get(key) != saved.get(key):  # NaN differs from NaN
            changed.append(f"{key} is {now}, but was {before}")
    return ", and ".join(changed) or None
