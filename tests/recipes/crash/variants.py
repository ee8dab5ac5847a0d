"""The runs to kill: small enough that a kill costs seconds, long enough to include every kind of save."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import OURS, demo_config
from torchtune_adaptive.rl.settings import PPO_KEYS

EPOCHS, STEPS_PER_EPOCH = 4, 5
STEPS = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY, KEEP = 2, 2
SAVES = sorted({*range(SAVE_EVERY, STEPS, SAVE_EVERY), *range(STEPS_PER_EPOCH, STEPS + 1, STEPS_PER_EPOCH)})
"""The steps after which a checkpoint exists."""
ROWS, MICROBATCHES = 2, 2
UPDATES = 2
"""Updates per iteration of PPO."""
SEARCHED = ("use_maximum_batch_size=True", "adaptive.memory_limit=64MiB", "adaptive.max_batch_size=4")


@dataclass(frozen=True)
class Variant:
    kind: str
    """A key of running.OURS."""
    ranks: int
    budget: bool = False
    """Limit microbatches by tokens instead of rows."""
    searched: bool = False
    """Search the number of rows before training."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.ranks}/{'tokens' if self.budget else 'searched' if self.searched else 'rows'}"

    @property
    def recipe(self) -> str:
        return OURS[self.kind][0]

    @property
    def stages(self) -> int:
        """Return how often a step calls a StepRunner."""
        return 5 + 2 * UPDATES if self.kind == "full_ppo" else 2 if self.kind.endswith("_dpo") else 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the recipe's keys in addition to those of finetuning."""
        return PPO_KEYS if self.kind == "full_ppo" else ()

    def safe_after(self, step: int) -> int:
        """Return the step that must be on disk once `step` is done, so that a kill loses only later steps."""
        return max((save for save in SAVES if save < step), default=0)


FULL, LORA = Variant("full", 1, budget=True), Variant("lora", 1)
"""Variants that are killed at every operation."""
PAIRS, PAIRS_LORA = Variant("full_dpo", 2), Variant("lora_dpo", 1, budget=True)
"""Preference training, whose steps have two stages."""
PPO = Variant("full_ppo", 2)
"""A step is an iteration, an epoch one pass over the prompts."""


def write_config(variant: Variant, folder: Path, *overrides: str) -> list[str]:
    """Write the config; return the arguments that start and resume this run."""
    cfg = _config(
        variant,
        folder,
        "metric_logger._component_=tests.recipes.crash.kill_hook.WatchedLogger",
        *("clip_grad_norm=1.0", "shuffle=True"),
        "resume_from_checkpoint=auto",
        *(f"save_every_n_steps={SAVE_EVERY}", f"keep_last_n_checkpoints={KEEP}"),
        *(["adaptive.token_budget=256"] if variant.budget else []),
        *(SEARCHED if variant.searched else []),
        *overrides,
    )
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml")
    return ["--config", str(folder / "config.yaml")]


def _config(variant: Variant, folder: Path, *overrides: str) -> DictConfig:
    if variant.kind == "full_ppo":
        answers = STEPS_PER_EPOCH * ROWS * variant.ranks
        return ppo_config(
            folder,
            *(f"dataset.samples={answers}", f"num_steps={EPOCHS * answers}", "max_generated_tokens=4"),
            *(f"batch_size={ROWS}", f"ppo_batch_size={ROWS}", f"ppo_epochs={UPDATES}", "forward_batch_size=1"),
            *(f"gradient_accumulation_steps={ROWS}", "optimizer.momentum=0.9"),
            *overrides,
        )
    samples = STEPS_PER_EPOCH * ROWS * MICROBATCHES * variant.ranks
    return demo_config(
        variant.kind,
        folder,
        f"checkpointer.checkpoint_dir={folder.parent / 'weights'}",
        *(f"dataset.samples={samples}", "tokenizer.max_seq_len=96"),
        *(f"batch_size={ROWS}", f"gradient_accumulation_steps={MICROBATCHES}", f"epochs={EPOCHS}"),
        *overrides,
    )
