"""Rehearse the recipe of a request: run its search for the batch size, and then two steps with the result."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import keys_of
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.null_cuda import NullCudaError
from torchtune_adaptive.rehearse import RehearsalResult, rehearse
from torchtune_adaptive.rehearse.gpus import Gpu
from torchtune_adaptive.rehearse_recipe.request import PlanRequest, PlanSettings

STAND_INS = "torchtune_adaptive.rehearse_recipe.stand_ins"
STEPS = 2
"""Steps to rehearse: at least two, because the optimizer state is not yet in memory in the first backward."""
SAMPLES = 4096
"""Samples of a rank in a step: more than fit on any GPU, so that the search finds the limit."""


def rehearse_recipe(request: PlanRequest, overrides: Sequence[str], gpu: Gpu, ranks: int | None) -> RehearsalResult:
    """Rehearse the recipe of a request with more overrides of its config."""
    ranks = ranks or 1
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        config = Path(name, "config.yaml")
        OmegaConf.save(rehearsed_config(request, ranks, Path(name)), config)
        command = ["-m", request.recipe.name, "--config", str(config), *overrides]
        try:
            found = rehearse(command, gpu, ranks, memory_overhead=request.plan.memory_overhead, steps=STEPS, quiet=True)
        except NullCudaError as error:
            raise AdaptiveError(f"tune-adaptive plan runs the recipe on a null device: {error}") from error
    # Rehearsed answers end at once, so the time of a step is unknown.
    return replace(found, traced={}) if request.recipe.trains_on_rollouts else found


def rehearsed_config(request: PlanRequest, ranks: int, folder: Path) -> DictConfig:
    """Return the config to rehearse, with stand-ins for weights, tokenizer and data, and all output in `folder`."""
    cfg: dict[str, Any] = OmegaConf.to_container(request.cfg, resolve=True)  # type: ignore[assignment]
    for key in keys_of(PlanSettings):
        cfg.pop(key, None)
    (folder / "none").touch()
    files = {"checkpoint_dir": str(folder), "checkpoint_files": ["none"], "output_dir": str(folder)}
    for key in [key for key in cfg if key.endswith("checkpointer")]:
        cfg[key] = {COMPONENT: f"{STAND_INS}.NoWeights", **files, "model_type": "LLAMA3"}
    per_step = int(cfg["batch_size"]) * int(cfg.get("gradient_accumulation_steps") or 1)
    samples = max(SAMPLES, per_step * (STEPS + 1))  # the epoch must not end before the last step
    return OmegaConf.create(
        {
            **cfg,
            "tokenizer": {COMPONENT: f"{STAND_INS}.NoTokenizer", "max_seq_len": request.length},
            "dataset": {
                COMPONENT: f"{STAND_INS}.SyntheticDataset",
                "lengths": [request.length],
                "samples": ranks * samples // per_step * per_step,
            },
            **({"reward_functions": [{COMPONENT: f"{STAND_INS}.reward"}]} if "reward_functions" in cfg else {}),
            "output_dir": str(folder),
            "metric_logger": {COMPONENT: "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
            "profiler": None,
            "run_val_every_n_steps": None,
            "keep_best_checkpoint": False,
            "seed": cfg.get("seed") or 0,
            "shuffle": False,
            "device": "cuda",
            "resume_from_checkpoint": False,
            "batch_increase_function": None,
            "max_steps_per_epoch": None,
            **({} if request.recipe.trains_on_rollouts else {"epochs": 1}),
            "use_maximum_batch_size": request.searches_rows,
            "adaptive": {
                **(cfg.get("adaptive") or {}),
                # With a given batch size, the first out-of-memory error ends the run.
                **({"recover_from_oom": False} if request.has_batch_size else {}),
                "memory_limit": None,
                "sequence_length": None,
            },
        }
    )
