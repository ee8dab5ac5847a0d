"""The config keys of PPO and GRPO. They are read and checked before any component is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
    LoraSettings,
    Rule,
    Settings,
    one_of,
    read_common,
    setting,
    value_at,
)
from torchtune_adaptive.errors import ConfigError, refuse
from torchtune_adaptive.formatting import count_of

POLICY_SECTION, VALUE_SECTION, REWARD_SECTION = "policy_model", "reward_and_value_model", "reward_model"
"""Config sections of models. PPO builds value and reward model from one section; GRPO's policy is in `model`."""
POLICY_FILES, VALUE_FILES, REWARD_FILES = "checkpointer", "value_checkpointer", "reward_checkpointer"
PPO_REFERENCE_FILES, GRPO_REFERENCE_FILES = "ref_policy_checkpointer", "ref_checkpointer"
REWARD_FUNCTIONS = "reward_functions"

TOKENS = Rule(lambda v: isinstance(v, list) and all(map(INTEGER.accepts, v)), "a list of tokens, as numbers")
AT_LEAST_2 = Rule(
    lambda v: INTEGER.accepts(v) and v >= 2, "a whole number of at least 2, since answers to a prompt are compared"
)
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
class RolloutSettings:
    """Keys that PPO and GRPO share, with torchtune's names."""

    batch_size: int = setting(COUNT)
    num_steps: int = setting(COUNT)
    ppo_epochs: int = setting(COUNT, 1)
    forward_batch_size: int = setting(COUNT)
    max_generated_tokens: int = setting(COUNT)
    temperature: float = setting(TEMPERATURE, 1.0)
    top_k: int | None = setting(COUNT | NULL, None)
    stop_token_ids: tuple[int, ...] | None = setting(TOKENS | NULL, None)
    grpo_samples: int = 1

    @property
    def answers(self) -> int:
        """The number of answers per rank and iteration."""
        return self.batch_size * self.grpo_samples

    @property
    def updates(self) -> int:
        """The number of optimizer steps per iteration."""
        return self.ppo_epochs

    def iterations(self, ranks: int) -> int:
        """Return the number of iterations of the run."""
        return self.num_steps


@dataclass(frozen=True, kw_only=True)
class PPOLoss:
    """The section `loss` of PPO, with torchtune's names and defaults."""

    epsilon: float = setting(CLIP, 0.1)
    value_clip_range: float = setting(CLIP, 0.2)
    value_coeff: float = setting(COST, 0.1)


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """The section `loss` of GRPO."""

    epsilon: float = setting(CLIP, 0.2)
    epsilon_high: float | None = setting(CLIP | NULL, None)
    kl_coeff: float = setting(COST, 0.0)
    average: str = setting(one_of("tokens", "answers", "length"), "tokens")

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio of probabilities may fall below 1 and rise above 1."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high


def _loss_of(kind: type[PPOLoss] | type[GRPOLoss], section: Any, key: str) -> PPOLoss | GRPOLoss:
    """Read the coefficients of the section `loss`. Its _component_ may be torchtune's loss, which is not built."""
    options, algorithm = dict(keys.plain(section, key)), kind.__name__.removesuffix("Loss")
    named = str(options.pop("_component_", algorithm))
    if not named.rpartition(".")[2].startswith(algorithm):
        raise ConfigError(f"loss._component_ is {named}, but {algorithm} has a fixed loss: remove the line")
    return keys.read_section(kind, options, key)


@dataclass(frozen=True, kw_only=True)
class PPOSettings(RolloutSettings):
    """Keys of PPO, with torchtune's names."""

    ppo_batch_size: int = setting(COUNT)
    gradient_accumulation_steps: int = setting(COUNT)
    min_response_length: int | None = setting(COUNT_OR_0 | NULL, None)
    penalise_no_eos: bool = setting(BOOL)
    reward_penalty: float = setting(REWARD)
    whiten_rewards: bool = setting(BOOL)
    gamma: float = setting(FROM_0_TO_1)
    lmbda: float = setting(FROM_0_TO_1)
    kl_coeff: float = setting(COST)
    loss: PPOLoss = setting(SECTION, PPOLoss(), convert=partial(_loss_of, PPOLoss))

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


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(RolloutSettings):
    """Keys of GRPO."""

    grpo_samples: int = setting(AT_LEAST_2)
    loss: GRPOLoss = setting(SECTION, GRPOLoss(), convert=partial(_loss_of, GRPOLoss))
    scale_rewards: bool = setting(BOOL, True)
    lora: LoraSettings | None = None
    """Keys of the adapters, if the run trains adapters."""


PPO_KEYS = (
    *(POLICY_SECTION, VALUE_SECTION, PPO_REFERENCE_FILES, VALUE_FILES, REWARD_FILES, REWARD_FUNCTIONS),
    "enable_kv_cache",  # a key of torchtune without effect here: answers are always generated with a cache
    *keys.keys_of(PPOSettings),
)
GRPO_KEYS = (*(REWARD_SECTION, GRPO_REFERENCE_FILES, REWARD_FILES, REWARD_FUNCTIONS), *keys.keys_of(GRPOSettings))
"""Sections and keys in addition to those of finetuning."""


def read_ppo_settings(cfg: DictConfig) -> tuple[Settings, PPOSettings]:
    """Read the settings of PPO, with the section of the policy as `model`."""
    if not OmegaConf.is_dict(policy := cfg.get(POLICY_SECTION)):
        raise ConfigError(f"{POLICY_SECTION} is missing: add a section with a _component_")
    ppo = keys.read(PPOSettings, cfg)
    cfg = cast(DictConfig, OmegaConf.merge(cfg, {"model": policy}))
    return _read(cfg, "PPO", _ppo_problems(cfg, ppo)), ppo


def read_grpo_settings(cfg: DictConfig) -> tuple[Settings, GRPOSettings]:
    """Read the settings of GRPO."""
    grpo = keys.read(GRPOSettings, cfg)
    return _read(cfg, "GRPO", _grpo_problems(cfg)), grpo


def read_grpo_lora_settings(cfg: DictConfig) -> tuple[Settings, GRPOSettings]:
    """Read the settings of GRPO with adapters; the keys of the adapters are in the section `model`."""
    lora = keys.read(LoraSettings, cfg.get("model"), prefix="model.")
    grpo = replace(keys.read(GRPOSettings, cfg), lora=lora)
    return _read(cfg, "GRPO", _grpo_problems(cfg)), grpo


def _read(cfg: DictConfig, algorithm: str, problems: Iterable[str]) -> Settings:
    """Read and check the settings that all recipes have; raise one ConfigError for all `problems` and others."""
    with_defaults = OmegaConf.merge({"gradient_accumulation_steps": 1}, cfg, {"epochs": UNLIMITED_EPOCHS})
    settings = replace(read_common(cast(DictConfig, with_defaults)), config=cfg, gradient_accumulation_steps=1)
    refuse(
        _common_problems(cfg, algorithm),
        not_at_default(settings, NOT_SUPPORTED, algorithm),
        problems,
        token_budget(settings),
    )
    return settings


def _common_problems(cfg: DictConfig, algorithm: str) -> Iterator[str]:
    for key in WITHOUT_EFFECT:
        if cfg.get(key) is not None:
            yield f"{key} is {cfg.get(key)}, but {algorithm} trains for num_steps: remove it"
    if value_at(cfg, "dataset.packed"):
        yield f"dataset.packed is True, but prompts cannot be packed in {algorithm}: set it to False"
    component = str(value_at(cfg, "optimizer._component_"))
    if component.startswith("bitsandbytes."):
        yield (
            f"optimizer._component_ is {component}, which does not support FSDP2's shards: set it to "
            "torch.optim.AdamW (or one of torchao.optim)"
        )


def _ppo_problems(cfg: DictConfig, ppo: PPOSettings) -> Iterator[str]:
    for part, whole in (("ppo_batch_size", "batch_size"), ("gradient_accumulation_steps", "ppo_batch_size")):
        size, of = getattr(ppo, part), getattr(ppo, whole)
        if of % size:
            yield f"{part} is {size} and {whole} is {of}: {whole} must be a multiple of {part}"


def _grpo_problems(cfg: DictConfig) -> Iterator[str]:
    if cfg.get(REWARD_SECTION) is None and not cfg.get(REWARD_FUNCTIONS):
        yield (
            f"{REWARD_FUNCTIONS} is missing: add a list of sections with a _component_ and a weight, or the sections "
            f"{REWARD_SECTION} and {REWARD_FILES}"
        )
