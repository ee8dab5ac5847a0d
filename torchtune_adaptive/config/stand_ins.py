"""Config of a rehearsal with `--without-data`: `tune/stand_ins.py` replaces weights, tokenizer and data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.errors import ConfigError

STAND_INS = "torchtune_adaptive.tune.stand_ins"
DEFAULT_TOKENS = 4096
SAMPLES = 4096
"""Samples of a rank: more than fit in a microbatch on any GPU, so that a search finds the limit."""
STEPS = 64
"""The epoch has this many steps, so that it does not end during a rehearsal."""


def length_of(cfg: DictConfig) -> int:
    """Return the number of tokens of each sample; in reinforcement learning, of each prompt."""
    lengths = (value_at(cfg, key) for key in ("adaptive.sequence_length", "tokenizer.max_seq_len"))
    return int(next(filter(None, lengths), DEFAULT_TOKENS))


def has_rollouts(cfg: DictConfig) -> bool:
    """Return True for configs of PPO. Without a tokenizer, their answers end at once."""
    return "reward_and_value_model" in cfg


def with_stand_ins(given: DictConfig, folder: Path) -> DictConfig:
    """Return the config with stand-ins, and with all output in `folder`. Every sample has `length_of(given)` tokens."""
    cfg: dict[str, Any] = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    if "image" in str(cfg.get("collate_fn")):
        raise ConfigError(f"--without-data has no images for {cfg['collate_fn']}: rehearse with the dataset")
    (folder / "none").touch()
    files = {"checkpoint_dir": str(folder), "checkpoint_files": ["none"], "output_dir": str(folder)}
    for key in [key for key in cfg if key.endswith("checkpointer")]:
        cfg[key] = {COMPONENT: f"{STAND_INS}.NoWeights", **files, "model_type": "LLAMA3"}
    length, per_step = length_of(given), int(cfg["batch_size"]) * int(cfg.get("gradient_accumulation_steps") or 1)
    samples = int(os.environ.get("WORLD_SIZE", 1)) * max(SAMPLES, per_step * STEPS)
    return OmegaConf.create(
        {
            **cfg,
            "tokenizer": {COMPONENT: f"{STAND_INS}.NoTokenizer", "max_seq_len": length},
            "dataset": {COMPONENT: f"{STAND_INS}.SyntheticDataset", "lengths": [length], "samples": samples},
            "output_dir": str(folder),
            "metric_logger": {COMPONENT: "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
            "profiler": None,
            "run_val_every_n_steps": None,
            "shuffle": False,
            "resume_from_checkpoint": False,
        }
    )
