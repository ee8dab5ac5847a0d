"""`use_maximum_batch_size`: the search before training, its record and what it shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from tqdm import tqdm

from torchtune_adaptive.comm.collectives import Agreement
from torchtune_adaptive.memory.device import MemorySource
from torchtune_adaptive.record.charts.searches import draw_profile, draw_search
from torchtune_adaptive.record.events import Event
from torchtune_adaptive.record.tables import (
    SEARCH_FILE,
    from_earlier_run,
    profile_event,
    profile_table,
    read_search,
    search_event,
    search_table,
    write_search,
)
from torchtune_adaptive.search.find import Progress, find_max_batch_size, profile_memory
from torchtune_adaptive.search.lengths import Profile
from torchtune_adaptive.search.peaks import Peak
from torchtune_adaptive.search.probe import TrainingStep
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.tune.parts.microbatch import Sample, cut
from torchtune_adaptive.tune.parts.model import phase_boundaries
from torchtune_adaptive.tune.parts.optimization import Optimization
from torchtune_adaptive.tune.run.static import predicted_rows
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings

logger = logging.getLogger(__name__)

Found: TypeAlias = Callable[[Event], None]
"""What keeps the record of a run."""

Answer = TypeVar("Answer", SearchResult, Profile)

CUDA_BUDGET_GRAIN = 2**28
"""Free memory of a GPU differs by a few MiB from start to start: budgets this close count as the same."""

SEARCHED = (
    "model",
    "optimizer",
    "loss",
    "dtype",
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "ac_mode",
    "ac_option",
    "optimizer_in_bwd",
    "clip_grad_norm",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "tensor_parallel_dim",
)
"""Keys of the config that change what a microbatch needs."""


def rows_that_fit(
    cfg: DictConfig,
    settings: Settings,
    adaptive: AdaptiveConfig,
    memory: MemorySource | None,
    worst_step: Callable[[], TrainingStep[Sample]],
    samples_per_rank: int,
    found: Found,
) -> int | None:
    """Collective: the most rows of a microbatch, if the config asks for them or for growth up to them."""
    grows = cfg.get("batch_increase_function") is not None
    if adaptive.token_budget is not None:  # then rows are not what fits
        return None
    if not settings.use_maximum_batch_size and (not grows or adaptive.max_batch_size is not None):
        return None
    if memory is None:
        if dist.get_rank() == 0:
            logger.info("batch search · nothing to find on a CPU, which has no limit: set adaptive.memory_limit")
        return None
    most_rows = min(samples_per_rank, adaptive.max_batch_size or samples_per_rank)
    return search_batch_size(cfg, settings, adaptive, memory, worst_step(), most_rows, found)


def search_batch_size(
    cfg: DictConfig,
    settings: Settings,
    adaptive: AdaptiveConfig,
    memory: MemorySource,
    step: TrainingStep[Sample],
    most_rows: int,
    found: Found,
) -> int:
    """Collective: the most rows, up to `most_rows`, that every rank can train with; recorded in `output_dir`."""
    options: dict[str, Any] = {"strategy": adaptive.search, "round_to": adaptive.round_to, "max_rows": most_rows}
    directory, fingerprint = Path(settings.output_dir), _fingerprint(cfg, step.length, memory, options)
    if adaptive.reuse_search and (known := _found_before(directory, fingerprint, SearchResult)):
        found(from_earlier_run(search_event(known, step.length)))
        return known.rows
    expected_rows = predicted_rows(cfg, step.length, memory.budget_bytes) if adaptive.search == "static" else 0
    with _progress_bar() as progress:
        result = find_max_batch_size(
            step,
            memory=memory,
            samples_per_step=settings.samples_per_step,
            expected_rows=expected_rows,
            progress=progress,
            **options,
        )
    if dist.get_rank() == 0:
        logger.info("%s", search_table(result, step.length))
        write_search(directory, result, step.length, fingerprint)
        draw_search(directory, result, step.length)
    found(search_event(result, step.length))
    return result.rows


def profile_lengths(
    cfg: DictConfig,
    settings: Settings,
    adaptive: AdaptiveConfig,
    memory: MemorySource,
    step: TrainingStep[Sample],
    most_rows: int,
    found: Found,
) -> Profile:
    """Collective: what microbatches need over rows and length; recorded in `output_dir`."""
    options: dict[str, Any] = {"most_rows": most_rows, "shorten": adaptive.oversize != "error"}
    directory, fingerprint = Path(settings.output_dir), _fingerprint(cfg, step.length, memory, options)
    if adaptive.reuse_search and (known := _found_before(directory, fingerprint, Profile)):
        found(from_earlier_run(profile_event(known)))
        return known
    with _progress_bar() as progress:
        result = profile_memory(step, memory=memory, progress=progress, **options)
    if dist.get_rank() == 0:
        logger.info("%s", profile_table(result))
        write_search(directory, result, step.length, fingerprint)
        draw_profile(directory, result)
    found(profile_event(result))
    return result


def training_step(
    runner: StepRunner[Sample], optimization: Optimization, loss_fn: nn.Module, sample: Sample
) -> TrainingStep[Sample]:
    """The recipe's step, as a search runs it."""
    return TrainingStep(
        runner=runner,
        sample=sample,
        update=lambda result: optimization.update(result.target_tokens),
        optimizers=optimization.optimizers,
        boundaries=phase_boundaries(runner.model, loss_fn),
        cut=cut,
    )


def _found_before(directory: Path, fingerprint: Mapping[str, Any], kind: type[Answer]) -> Answer | None:
    """Collective: what rank 0 finds in its record, on every rank."""
    found: list[Answer | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [read_search(directory, fingerprint, kind)]
        except ValueError as error:
            logger.warning("%s; searching again", error)
        if found[0] is not None:
            logger.info(
                "batch search · as in %s (adaptive.reuse_search: False searches again)", directory / SEARCH_FILE
            )
    dist.broadcast_object_list(found)
    return found[0]


def _fingerprint(cfg: DictConfig, length: int, memory: MemorySource, options: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: all that the answer depends on."""
    budgets = [int(budget) for (budget,) in Agreement(1).gather([memory.budget_bytes])]
    on_gpu = str(cfg.device).startswith("cuda")
    return {
        **{key: OmegaConf.to_container(OmegaConf.create({"v": cfg.get(key)}), resolve=True)["v"] for key in SEARCHED},  # type: ignore[index, call-overload]
        **options,
        "sequence_length": length,
        "world_size": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "budgets": [budget // CUDA_BUDGET_GRAIN for budget in budgets] if on_gpu else budgets,
    }


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    with tqdm(desc="batch search", unit=" probes", disable=dist.get_rank() != 0, leave=False) as bar:

        def progress(rows: int, measured: Peak | None) -> None:
            if measured is None:
                bar.set_postfix_str(f"{rows} rows")
            else:
                bar.update(1)

        yield progress
