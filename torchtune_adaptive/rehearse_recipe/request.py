"""A request to `tune-adaptive plan`: a config, its recipe, the GPUs, the numbers of ranks and the length of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.config import components, keys
from torchtune_adaptive.config.checks import SECTIONS
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import MOST_TOKENS, NULL, TEXT, one_of, setting, value_at
from torchtune_adaptive.config.registry import FULL, FULL_DPO, GRPO, GRPO_LORA, LORA, LORA_DPO, PPO, Recipe
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import parse_amount
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rl.settings import GRPO_KEYS, POLICY_SECTION, PPO_KEYS

DEFAULT_TOKENS = 4096
MOST_RANKS = 65_536


def _overhead_bytes(value: Any, key: str) -> int:
    return parse_amount(value, key) if value else 0


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The keys that `tune-adaptive plan` accepts in addition to those of the recipe."""

    world_size: int | tuple[int, ...] = setting(keys.count_up_to(MOST_RANKS) | keys.counts_up_to(MOST_RANKS), 1)
    """number of ranks, or several numbers to compare, such as `[1,2,4,8]`. Only one rank is rehearsed, so any number
    works"""
    memory_limit: str | float = setting(TEXT | keys.NUMBER, "h100")
    """memory of a rank: an amount (`24GiB`, `80GB`) or a card (`h100`, `a100-40`, `4090`), or several to compare, such
    as `4090,h100`"""
    memory_overhead: int | None = setting(TEXT | one_of(0) | NULL, None, convert=_overhead_bytes)
    """memory of a rank that tensors cannot use (CUDA context, NCCL, libraries). null: `3GiB`, or `1GiB` for one
    process"""
    sequence_length: int | None = setting(keys.count_up_to(MOST_TOKENS) | NULL, None)
    """tokens of a row. null: `adaptive.sequence_length`, else `tokenizer.max_seq_len`, else 4096"""
    format: str = setting(one_of("table", "json"), "table")
    """output format. `json`: a list with an object for each row. Each has the keys of a row of `tune-adaptive
    rehearse --gpu 4090,h100`, and also `command`"""


PLAN_KEYS = (*PPO_KEYS, *GRPO_KEYS, *keys.keys_of(PlanSettings))
"""Keys that `tune-adaptive plan` accepts in addition to those of finetuning."""


def recipe_of(cfg: DictConfig) -> Recipe:
    """Return the recipe that runs this config."""
    if POLICY_SECTION in cfg:
        return PPO
    full, lora = (FULL, LORA)
    if "grpo_samples" in cfg:
        full, lora = (GRPO, GRPO_LORA)
    elif cfg.get("ref_checkpointer") is not None or "rlhf" in str(value_at(cfg, "loss._component_")):
        full, lora = (FULL_DPO, LORA_DPO)
    return lora if "lora_attn_modules" in components.require(cfg, "model") else full


@dataclass(frozen=True)
class PlanRequest:
    """A config, the settings of `tune-adaptive plan`, and the overrides of the command line."""

    cfg: DictConfig
    plan: PlanSettings
    config_name: str
    overrides: Sequence[str] = ()

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe to rehearse."""
        return recipe_of(self.cfg)

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks to compare."""
        counts = self.plan.world_size
        return [counts] if isinstance(counts, int) else list(dict.fromkeys(counts))

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs to compare."""
        return [_gpu(name.strip()) for name in dict.fromkeys(str(self.plan.memory_limit).lower().split(","))]

    @property
    def length(self) -> int:
        """The number of tokens of a row; in reinforcement learning, of a prompt."""
        keys_of_length = "adaptive.sequence_length", "tokenizer.max_seq_len"
        configured = (value_at(self.cfg, key) for key in keys_of_length)
        return int(self.plan.sequence_length or next(filter(None, configured), DEFAULT_TOKENS))

    @property
    def heading(self) -> str:
        """The first line of the output."""
        answers = "; answers end at once, except in the searches" * self.recipe.trains_on_rollouts
        return f"{self.config_name} · samples of {self.length} tokens{answers}"

    @property
    def has_batch_size(self) -> bool:
        """True if the command line sets a batch size; otherwise, the recipe searches for the largest."""
        is_set = any(word.startswith("batch_size=") for word in self.overrides)
        return is_set and not self.cfg.get("use_maximum_batch_size")

    @property
    def searches_rows(self) -> bool:
        """True if the recipe searches for the largest number of rows."""
        return not self.has_batch_size and value_at(self.cfg, "adaptive.token_budget") is None


def _gpu(name: str) -> Gpu:
    """Return the GPU with this name, or an H100 with this amount of memory."""
    if name in GPUS:
        return GPUS[name]
    try:
        return GPUS["h100"]._replace(memory=parse_amount(name, "memory_limit"))
    except ConfigError as error:
        raise ConfigError(f"{error}; or a GPU: {', '.join(GPUS)}") from error


def read_request(cfg: DictConfig, config_name: str, overrides: Sequence[str]) -> PlanRequest:
    """Read the settings and check them. Raise a ConfigError if they are invalid, or if the recipe would reject them."""
    request = PlanRequest(cfg, keys.read(PlanSettings, cfg), config_name, overrides)
    sections = {str(key) for key in cfg if value_at(cfg, f"{key!s}.{COMPONENT}") is not None}
    if unknown := sorted(sections - {*SECTIONS, *PLAN_KEYS}):
        raise ConfigError(
            f"{', '.join(unknown)}: not a section of any recipe that this command supports, so the rehearsal would be "
            f"wrong: use tune-adaptive rehearse --ranks {request.ranks[0]} -- tune run RECIPE --config {config_name}"
        )
    if not str(cfg.get("device", "cuda")).startswith("cuda"):
        raise ConfigError(f"device is {cfg.device}, which tune-adaptive plan does not support: set device=cuda")
    if "image" in str(cfg.get("collate_fn")):
        raise ConfigError(f"tune-adaptive plan has no images for {cfg.collate_fn}: find the batch size in training")
    request.recipe.read(cfg)
    request.gpus  # noqa: B018
    return request
