"""The record of an earlier search, which counts as long as nothing has changed that it depends on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.comm.collectives import Agreement, from_rank_0
from torchtune_adaptive.memory.device import MemorySource
from torchtune_adaptive.record.search_file import SEARCH_FILE, Result, read_search
from torchtune_adaptive.tune.config.settings import on_gpu

logger = logging.getLogger(__name__)


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
SEARCHED_WHERE_GIVEN = (
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "policy_model",
    "reward_and_value_model",
    "max_generated_tokens",
    "temperature",
    "top_k",
)
"""Further such keys, which count where a config has them, so that records from before they were known stay valid."""


def found_before(directory: Path, fingerprint: Mapping[str, object], kind: type[Result]) -> Result | None:
    """Collective: what rank 0 finds in its record, on every rank."""
    found: Result | None = None
    if dist.get_rank() == 0:
        try:
            found = read_search(directory, fingerprint, kind)
        except ValueError as error:
            logger.warning("%s; searching again", error)
        if found is not None:
            logger.info(
                "batch search · as in %s (adaptive.reuse_search: False searches again)", directory / SEARCH_FILE
            )
    return from_rank_0(found)


def what_it_depends_on(
    cfg: DictConfig, length: int, memory: MemorySource, options: Mapping[str, object]
) -> dict[str, object]:
    """Collective: all that the result depends on."""
    # an Agreement allocates nothing, and there may be ranks that have no room for anything
    budgets = [int(budget) for (budget,) in Agreement(1).gather([memory.budget_bytes])]
    keys = (*SEARCHED, *(key for key in SEARCHED_WHERE_GIVEN if key in cfg))
    return {
        **{key: OmegaConf.to_container(OmegaConf.create({"v": cfg.get(key)}), resolve=True)["v"] for key in keys},  # type: ignore[index, call-overload]
        **options,
        "sequence_length": length,
        "world_size": dist.get_world_size(),
        "device": torch.get_device_module(cfg.device).get_device_name() if on_gpu(cfg) else "cpu",
        "torch": torch.__version__,
        "budgets": [budget // CUDA_BUDGET_GRAIN for budget in budgets] if on_gpu(cfg) else budgets,
    }
