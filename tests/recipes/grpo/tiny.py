"""Tiny GRPO runs, of all weights and of adapters."""

from pathlib import Path

from omegaconf import DictConfig

from tests.recipes.running import config_in

KINDS = ("full_grpo", "lora_grpo")
STEPS = 3
TINY = (
    *(f"{section}.{size}" for section in ("model", "demo_sizes") for size in ("num_layers=1", "embed_dim=32")),
    f"dataset.samples={12 * STEPS}",
    "shuffle=False",
    "batch_size=3",
    "grpo_samples=4",
    f"num_steps={STEPS}",
    "ppo_epochs=2",
    "forward_batch_size=8",
    "loss.kl_coeff=0.05",
    "use_maximum_batch_size=False",
    "adaptive=null",
    "optimizer._component_=torch.optim.SGD",
    "optimizer.lr=0.5",
    "optimizer.fused=False",
    "clip_grad_norm=null",
)
JUDGE = (
    "reward_model._component_=torchtune_adaptive.demo.model.demo_classifier",
    "reward_checkpointer._component_=torchtune_adaptive.demo.weights.demo_checkpointer",
    "reward_checkpointer.checkpoint_dir=${checkpointer.checkpoint_dir}",
    "reward_checkpointer.checkpoint_files=[demo_reward.pt]",
    "reward_checkpointer.output_dir=${output_dir}",
)
"""Overrides that add a reward model."""


def grpo_config(kind: str, folder: Path, *overrides: str) -> DictConfig:
    """Return a small demo config."""
    return config_in(folder, "grpo" if kind == "full_grpo" else "grpo_lora", *TINY, *overrides)
