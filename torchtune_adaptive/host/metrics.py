"""What a run shows: a progress bar, and the metric logger that the config names. Only rank 0 shows anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_adaptive.host import components
from torchtune_adaptive.host.settings import Settings
from torchtune_adaptive.reports import StepResult

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class Metrics:
    """Logs each step under torchtune's names and keeps the progress bar of the epoch."""

    def __init__(self, cfg: DictConfig, settings: Settings, device: torch.device) -> None:
        self._shown = dist.get_rank() == 0
        self._every = settings.log_every_n_steps
        self._memory_of = device if settings.log_peak_memory_stats and device.type != "cpu" else None
        self._step_began = time.perf_counter()
        self._losses: tuple[float, float] | None = None
        self._output_dir = settings.output_dir
        if self._shown:
            self._logger = components.build("metric_logger", cfg)
            self._logger.log_config(cfg)

    def epoch(self, epoch: int, steps: Iterable[Item], total: int) -> Iterator[Item]:
        """The steps of an epoch, with a progress bar around them."""
        self._epoch = epoch
        ours = [logging.getLogger("torchtune_adaptive")]
        with logging_redirect_tqdm(ours), tqdm(total=total, disable=not self._shown) as self._bar:
            self._step_began = time.perf_counter()
            yield from steps

    def log_step(
        self,
        step: int,
        result: StepResult,
        recoveries: int,
        *,
        learning_rate: float,
        grad_norm: float | None,
    ) -> None:
        loss = float(result.loss_sum) / max(1, result.target_tokens)
        seconds = time.perf_counter() - self._step_began
        self._step_began = time.perf_counter()
        if not self._shown:
            return
        self._losses = (self._losses[0] if self._losses else loss, loss)
        self._bar.update(1)
        self._bar.set_description(f"{self._epoch + 1}|{step}|Loss: {loss:.4f}")
        if step % self._every == 0:
            figures = {
                "loss": loss,
                "lr": learning_rate,
                "tokens_per_second_per_gpu": result.target_tokens / (seconds * dist.get_world_size()),
                "microbatches": result.microbatches,
                "microbatch_rows": result.load.most_rows,
                "microbatch_tokens": result.load.most_tokens,
                "padding_fraction": 1 - result.load.tokens / result.load.padded_tokens,
                "oom_recoveries": recoveries,
                **self._peak_memory(),
            }
            self._logger.log_dict(figures if grad_norm is None else {**figures, "grad_norm": grad_norm}, step=step)

    def close(self) -> None:
        if not self._shown:
            return
        if self._losses:
            logger.info("trained: loss %.4f -> %.4f, checkpoints in %s", *self._losses, self._output_dir)
        self._logger.close()

    def _peak_memory(self) -> Mapping[str, float]:
        if self._memory_of is None:
            return {}
        stats: Mapping[str, float] = training.get_memory_stats(device=self._memory_of)
        return stats
