"""`adaptive.search: static`: what will fit, predicted before training.

A prediction needs a process group that does not exist, and tensors without data. So it runs in a process of its own,
which rank 0 starts with the run's config, while the other ranks wait.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.comm.collectives import Agreement, from_rank_0
from torchtune_adaptive.errors import AdaptiveError, PredictionError

logger = logging.getLogger(__name__)

PROGRAM = "torchtune_adaptive.tune.plan.static_rows"
TIME_LIMIT_S = 300.0
"""Seconds for the prediction: fewer than the other ranks wait in a collective before they give up."""
OF_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def predicted_rows(
    cfg: DictConfig,
    tokens: int,
    budget_bytes: int,
    stage: str = "",
    *,
    whole_step_rows: int | None = None,
    fallen_back: bool = False,
) -> int:
    """Collective: the most rows of this length that are predicted to fit on every rank, in a stage of the step where it
    has several; with `fallen_back`, as it runs after one row did not fit. 0 where nothing could be predicted."""
    tightest_bytes = min(int(budget) for (budget,) in Agreement(1).gather([budget_bytes]))
    rows = 0
    if dist.get_rank() == 0:
        started = time.perf_counter()
        try:
            question: dict[str, object] = {
                "tokens": tokens,
                "budget_bytes": tightest_bytes,
                "whole_step_rows": whole_step_rows,
                "stage": stage,
                "fallen_back": fallen_back,
            }
            rows = _in_a_process(cfg, dist.get_world_size(), question)
            seconds = time.perf_counter() - started
            logger.info("batch search · predicted to fit: %d rows (%.0f s)", rows, seconds)
        except (AdaptiveError, OSError, ValueError) as error:  # of which the other ranks would never learn
            logger.warning(
                "batch search · the prediction failed, continuing as with adaptive.search: linear · %s", error
            )
    return from_rank_0(rows)


def _in_a_process(cfg: DictConfig, world_size: int, question: dict[str, object]) -> int:
    asked = {"cfg": OmegaConf.to_container(cfg, resolve=True), "world_size": world_size, **question}
    kept = {key: value for key, value in os.environ.items() if key not in OF_THE_LAUNCHER}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps(asked),
            env={**kept, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise PredictionError(f"the prediction took longer than {TIME_LIMIT_S:.0f} s") from error
    if ended.returncode != 0:
        raise PredictionError((ended.stderr.strip().splitlines() or ["the prediction exited without output"])[-1])
    return int(ended.stdout.splitlines()[-1])
