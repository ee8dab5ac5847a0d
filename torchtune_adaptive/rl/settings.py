"""The keys of torchtune's `ppo_full_finetune_single_device`, read and checked before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import keys
from torchtune_adaptive.config.checks import not_at_default, refuse, token_budget
from torchtune_adaptive.config.keys import (
    BOOL,
    COUNT,
    COUNT_OR_0,
    INTEGER,
    NULL,
    NUMBER,
    Rule,
    Settings,
    option,
    read_common,
    value_at,
)
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import count_of

POLICY_SECTION, VALUE_SECTION = "policy_model", "reward_and_value_model"
POLICY_FILES, REFERENCE_FILES = "checkpointer", "ref_policy_checkpointer"
VALUE_FILES, REWARD_FILES = "value_checkpointer", "reward_checkpointer"
REWARD_FUNCTIONS = "reward_functions"
TRAINED_FILES = f"{POLICY_FILES}.checkpoint_files and {VALUE_FILES}.checkpoint_files"

TOKENS = Rule(lambda v: isinstance(v, list) and all(map(INTEGER.accepts, v)), "a list of tokens, as numbers")
FINITE = Rule(lambda v: NUMBER.accepts(v) and abs(v) < math.inf, "a finite number")
FINITE_OR_0 = Rule(lambda v: FINITE.accepts(v) and v >= 0, "a finite number of at least 0")
FINITE_ABOVE_0 = Rule(lambda v: FINITE.accepts(v) and v > 0, "a finite number above 0")
CLIP = Rule(lambda v: NUMBER.accepts(v) and v >= 0, "a number of at least 0, or .inf, which clips nothing")
MOST_EPOCHS = 100_000
"""Stands for `epochs`, which PPO's configs lack: they say `num_steps`."""

NOT_FOR_PPO = (
    "tensor_parallel_dim",
    "collate_fn",
    "fsdp_cpu_offload",
    "enable_activation_offloading",
    "enable_async_checkpointing",
    "save_adapter_weights_only",
)
WITHOUT_EFFECT = ("epochs", "max_steps_per_epoch", "batch_increase_function")
"""Keys of finetuning that PPO has no use for: `num_steps` says how long it trains."""


class RolloutSettings(Protocol):
    """What iterations of any kind are planned from."""

    @property
    def batch_size(self) -> int: ...
    @property
    def max_generated_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...] | None: ...
    @property
    def answers(self) -> int:
        """Answers of a rank in an iteration."""

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""

    def iterations(self, ranks: int) -> int:
        """Iterations of the whole run."""


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """PPO's own keys, with torchtune's names."""

    num_steps: int = option(COUNT)
    ppo_epochs: int = option(COUNT)
    ppo_batch_size: int = option(COUNT)
    gradient_accumulation_steps: int = option(COUNT)
    forward_batch_size: int = option(COUNT)
    max_generated_tokens: int = option(COUNT)
    enable_kv_cache: bool = option(BOOL, True)
    temperature: float = option(FINITE_ABOVE_0)
    top_k: int | None = option(COUNT | NULL, None)
    min_response_length: int | None = option(COUNT_OR_0 | NULL, None)
    penalise_no_eos: bool = option(BOOL)
    reward_penalty: float = option(FINITE)
    stop_token_ids: tuple[int, ...] | None = option(TOKENS | NULL, None)
    whiten_rewards: bool = option(BOOL)
    gamma: float = option(FINITE)
    lmbda: float = option(FINITE)
    kl_coeff: float = option(FINITE_OR_0)

    batch_size: int = option(COUNT)
    reward_timeout: float | None = option(FINITE_ABOVE_0 | NULL, None)

    @property
    def answers(self) -> int:
        return self.batch_size

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return self.ppo_epochs * (self.batch_size // self.ppo_batch_size)

    def iterations(self, ranks: int) -> int:
        """Iterations of the whole run, at least one: `num_steps` counts samples over all ranks."""
        size = self.batch_size * ranks
        if self.num_steps < size:
            raise ConfigError(
                f"num_steps is {self.num_steps}, but one iteration takes {size} samples: batch_size {self.batch_size} "
                f"× {count_of(ranks, 'rank')}; raise num_steps, or lower batch_size"
            )
        return self.num_steps // size


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The coefficients of the loss's section, with torchtune's names and defaults."""

    epsilon: float = option(CLIP, 0.1)
    value_clip_range: float = option(CLIP, 0.2)
    value_coeff: float = option(FINITE_OR_0, 0.1)


PPO_KEYS = (
    *(POLICY_SECTION, VALUE_SECTION, REFERENCE_FILES, VALUE_FILES, REWARD_FILES, REWARD_FUNCTIONS),
    *(field.name for field in fields(PPOSettings)),
)
"""Sections and keys of the config besides those of finetuning."""


def read_ppo_settings(cfg: DictConfig) -> tuple[Settings, PPOSettings]:
    """Settings of PPO. What the other recipes call the model is the policy, and a step is an iteration."""
    _check_optimizer(cfg)
    if not OmegaConf.is_dict(policy := cfg.get(POLICY_SECTION)):
        raise ConfigError(f"{POLICY_SECTION} is missing: add a section with a _component_")
    for key in WITHOUT_EFFECT:
        if cfg.get(key) is not None:
            raise ConfigError(f"{key} is {cfg.get(key)}, but PPO trains for num_steps samples: remove it")
    ppo = keys.read(PPOSettings, cfg)
    keys.read(LossSettings, cfg.get("loss"), prefix="loss.")
    seen = OmegaConf.merge(cfg, {"model": policy, "epochs": MOST_EPOCHS})
    assert isinstance(seen, DictConfig)
    settings = read_common(seen)
    del seen["epochs"]  # of which whoever reads the config would think that it was given
    refuse(not_at_default(settings, NOT_FOR_PPO, "PPO"), _contradictions(settings, ppo), token_budget(settings))
    return replace(settings, gradient_accumulation_steps=1), ppo


def _contradictions(settings: Settings, ppo: PPOSettings) -> Iterator[str]:
    """Sizes that do not go together, and what no stage can do yet."""
    for part, whole in (("ppo_batch_size", "batch_size"), ("gradient_accumulation_steps", "ppo_batch_size")):
        size, of = getattr(ppo, part), getattr(ppo, whole)
        if of % size:
            yield f"{part} is {size} and {whole} is {of}: {whole} must be a multiple of {part}"
    if (ppo.min_response_length or 0) > ppo.max_generated_tokens:
        yield (
            f"min_response_length is {ppo.min_response_length} and max_generated_tokens is {ppo.max_generated_tokens}: "
            "every answer would be penalised as too short; lower min_response_length or set it to null"
        )
    if not (0 <= ppo.gamma <= 1 and 0 <= ppo.lmbda <= 1):
        yield f"gamma is {ppo.gamma} and lmbda is {ppo.lmbda}: both must be from 0 to 1"
    if settings.resume_from_checkpoint is True:
        yield (
            "resume_from_checkpoint is True, but a PPO checkpoint has several parts (two models, an optimizer and "
            "more), which are found only together: set it to auto"
        )
    yield from of_rollouts(settings.config, "PPO")


def of_rollouts(cfg: DictConfig, training: str) -> Iterator[str]:
    """What no stage can do, whatever is trained."""
    for key, refused, reason, allowed in (
        ("enable_kv_cache", False, "answers are always generated with a cache", "True"),
        ("dataset.packed", True, "prompts cannot be packed", "False"),
        ("adaptive.padding", False, "rows of rollouts are padded to the longest", "null or True"),
        ("adaptive.deal", True, "rollouts stay on the rank that has their prompts", "null or False"),
    ):
        if value_at(cfg, key) == refused:
            yield f"{key} is {refused}, but {reason} in {training}: set it to {allowed}"


def _check_optimizer(cfg: DictConfig) -> None:
    """One error for both lines of torchtune's own config that cannot work on several ranks."""
    component = str(value_at(cfg, "optimizer._component_"))
    wrong, remedy = [], []
    if cfg.get("optimizer_in_bwd"):
        wrong.append("optimizer_in_bwd is True, which updates weights inside a backward that may be repeated")
        remedy.append("optimizer_in_bwd: False")
    if component.split(".")[0] == "bitsandbytes":
        wrong.append(f"optimizer._component_ is {component}, which does not support FSDP2's shards")
        remedy.append("optimizer._component_: torch.optim.AdamW (or one of torchao.optim)")
    if wrong:
        raise ConfigError(f"{'; and '.join(wrong)}: set {' and '.join(remedy)}, as adaptive/mistral/7B_ppo does")
