"""The config keys of PPO. They are read and checked before any component is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import keys
from torchtune_adaptive.config.checks import not_at_default, token_budget
from torchtune_adaptive.config.keys import (
    BOOL,
    COUNT,
    COUNT_OR_0,
    INTEGER,
    NULL,
    NUMBER,
    SECTION,
    Rule,
    Settings,
    read_common,
    setting,
    value_at,
)
from torchtune_adaptive.errors import ConfigError, Remedy, refuse
from torchtune_adaptive.formatting import count_of

POLICY_SECTION, VALUE_SECTION = "policy_model", "reward_and_value_model"
"""Config sections of models. Value and reward model are built from one section."""
POLICY_FILES, VALUE_FILES, REWARD_FILES = "checkpointer", "value_checkpointer", "reward_checkpointer"
REFERENCE_FILES = "ref_policy_checkpointer"

TOKENS = Rule(lambda v: isinstance(v, list) and all(map(INTEGER.accepts, v)), "a list of tokens, as numbers")
FROM_0_TO_1 = Rule(lambda v: NUMBER.accepts(v) and 0 <= v <= 1, "a number from 0 to 1")
LARGEST = 1e12
"""The largest allowed reward. Sums of squares of larger numbers may overflow in single precision."""
REWARD = Rule(lambda v: NUMBER.accepts(v) and abs(v) <= LARGEST, f"a number from -{LARGEST:g} to {LARGEST:g}")
COST = Rule(lambda v: NUMBER.accepts(v) and 0 <= v <= LARGEST, f"a number from 0 to {LARGEST:g}")
TEMPERATURE = Rule(lambda v: NUMBER.accepts(v) and 1e-6 <= v < math.inf, "a finite number of at least 1e-06")
"""Logits are divided by it, which must not overflow."""
CLIP = Rule(lambda v: NUMBER.accepts(v) and v >= 0, "a number of at least 0, or .inf, for no clipping")
UNLIMITED_EPOCHS = 100_000
"""The value of `epochs`, because `num_steps` sets the length of a run."""

NOT_SUPPORTED = (
    "tensor_parallel_dim",
    "collate_fn",
    "fsdp_cpu_offload",
    "enable_activation_offloading",
    "optimizer_in_bwd",
    "run_val_every_n_steps",
)
WITHOUT_EFFECT = ("epochs", "max_steps_per_epoch", "batch_increase_function")
"""Keys of finetuning that would contradict `num_steps`."""


@dataclass(frozen=True, kw_only=True)
class PPOLoss:
    """The section `loss` of PPO, with torchtune's names and defaults."""

    epsilon: float = setting(CLIP, 0.1)
    value_clip_range: float = setting(CLIP, 0.2)
    value_coeff: float = setting(COST, 0.1)


def _loss_of(section: Any, key: str) -> PPOLoss:
    """Read the coefficients of the section `loss`. Its _component_ may be torchtune's loss, which is not built."""
    options = dict(keys.plain(section, key))
    named = str(options.pop("_component_", "PPOLoss"))
    if not named.rpartition(".")[2].startswith("PPO"):
        raise ConfigError(f"loss._component_ is {named}, but PPO has a fixed loss: remove the line")
    return keys.read_section(PPOLoss, options, key)


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """Keys of PPO, with torchtune's names."""

    batch_size: int = setting(COUNT)
    num_steps: int = setting(COUNT)
    ppo_epochs: int = setting(COUNT, 1)
    forward_batch_size: int = setting(COUNT)
    max_generated_tokens: int = setting(COUNT)
    temperature: float = setting(TEMPERATURE, 1.0)
    top_k: int | None = setting(COUNT | NULL, None)
    stop_token_ids: tuple[int, ...] | None = setting(TOKENS | NULL, None)
    ppo_batch_size: int = setting(COUNT)
    gradient_accumulation_steps: int = setting(COUNT)
    min_response_length: int | None = setting(COUNT_OR_0 | NULL, None)
    penalise_no_eos: bool = setting(BOOL)
    reward_penalty: float = setting(REWARD)
    whiten_rewards: bool = setting(BOOL)
    gamma: float = setting(FROM_0_TO_1)
    lmbda: float = setting(FROM_0_TO_1)
    kl_coeff: float = setting(COST)
    loss: PPOLoss = setting(SECTION, PPOLoss(), convert=_loss_of)

    @property
    def updates(self) -> int:
        """The number of optimizer steps per iteration."""
        return self.ppo_epochs * (self.batch_size // self.ppo_batch_size)

    def iterations(self, ranks: int) -> int:
        """Return the number of iterations, at least one; `num_steps` is the number of samples of all ranks."""
        size = self.batch_size * ranks
        if self.num_steps < size:
            raise ConfigError(
                f"num_steps is {self.num_steps}, but one iteration takes {size} samples: batch_size {self.batch_size} "
                f"× {count_of(ranks, 'rank')}; raise num_steps, or lower batch_size"
            )
        return self.num_steps // size


PPO_KEYS = (
    *(POLICY_SECTION, VALUE_SECTION, REFERENCE_FILES, VALUE_FILES, REWARD_FILES),
    "enable_kv_cache",  # a key of torchtune without effect here: answers are always generated with a cache
    *keys.keys_of(PPOSettings),
)
"""Sections and keys in addition to those of finetuning."""


REMEDIES_IN_PPO: Mapping[Remedy, str] = {
    **keys.REMEDIES,
    Remedy.SHORTER_SAMPLES: "lower max_generated_tokens or tokenizer.max_seq_len",
    Remedy.SMALLER_LIMIT: "lower forward_batch_size or raise gradient_accumulation_steps",
}
"""Remedies in PPO, where `batch_size` is not the size of a microbatch."""


def read_ppo_settings(cfg: DictConfig) -> tuple[Settings, PPOSettings]:
    """Read the settings of PPO, with the section of the policy as `model`. Raise one ConfigError for all problems."""
    if not OmegaConf.is_dict(policy := cfg.get(POLICY_SECTION)):
        raise ConfigError(f"{POLICY_SECTION} is missing: add a section with a _component_")
    ppo = keys.read(PPOSettings, cfg)
    cfg = cast(DictConfig, OmegaConf.merge(cfg, {"model": policy}))
    with_defaults = OmegaConf.merge({"gradient_accumulation_steps": 1}, cfg, {"epochs": UNLIMITED_EPOCHS})
    settings = replace(read_common(cast(DictConfig, with_defaults)), config=cfg, gradient_accumulation_steps=1)
    refuse(_problems(cfg, ppo), not_at_default(settings, NOT_SUPPORTED, "PPO"), token_budget(settings))
    return settings, ppo


def _problems(cfg: DictConfig, ppo: PPOSettings) -> Iterator[str]:
    for key in WITHOUT_EFFECT:
        if cfg.get(key) is not None:
            yield f"{key} is {cfg.get(key)}, but PPO trains for num_steps: remove it"
    if value_at(cfg, "dataset.packed"):
        yield "dataset.packed is True, but prompts cannot be packed in PPO: set it to False"
    component = str(value_at(cfg, "optimizer._component_"))
    if component.startswith("bitsandbytes."):
        yield (
            f"optimizer._component_ is {component}, which does not support FSDP2's shards: set it to "
            "torch.optim.AdamW (or one of torchao.optim)"
        )
    for part, whole in (("ppo_batch_size", "batch_size"), ("gradient_accumulation_steps", "ppo_batch_size")):
        size, of = getattr(ppo, part), getattr(ppo, whole)
        if of % size:
            yield f"{part} is {size} and {whole} is {of}: {whole} must be a multiple of {part}"
