"""The record of a search: `batch_search.json`, which a later run takes over if nothing has changed that it depends on,
and one event in the journal of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.atomic_files import keep_file, read_json
from torchtune_adaptive.config.keys import on_gpu
from torchtune_adaptive.engine.limits import Surface
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.ranks import Agreement, from_rank_0
from torchtune_adaptive.engine.search import Peak, Probe, SearchResult
from torchtune_adaptive.report.journal import SEARCH, Event
from torchtune_adaptive.text import count_of

logger = logging.getLogger(__name__)

SEARCH_FILE = "batch_search.json"
Result = TypeVar("Result", SearchResult, Profile)

CUDA_BUDGET_GRAIN = 2**28
"""Free memory of a GPU differs by a few MiB from start to start: budgets this close count as the same."""
DEPENDS_ON = (
    "model",
    "policy_model",
    "reward_and_value_model",
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
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "tensor_parallel_dim",
    "max_generated_tokens",
    "temperature",
    "top_k",
)
"""Keys of the config that change what a microbatch needs."""


def fingerprint_of(
    cfg: DictConfig, length: int, memory: MemorySource, options: Mapping[str, object]
) -> dict[str, object]:
    """Collective: everything that the result of a search depends on."""
    # an Agreement allocates nothing, and a rank may have no memory left
    budgets = [int(budget) for (budget,) in Agreement(1).gather([memory.budget_bytes])]
    given = OmegaConf.create({key: cfg.get(key) for key in DEPENDS_ON})
    return {
        **OmegaConf.to_container(given, resolve=True),  # type: ignore[dict-item]
        **options,
        "sequence_length": length,
        "world_size": dist.get_world_size(),
        "device": torch.get_device_module(cfg.device).get_device_name() if on_gpu(cfg) else "cpu",
        "torch": torch.__version__,
        "budgets": [budget // CUDA_BUDGET_GRAIN for budget in budgets] if on_gpu(cfg) else budgets,
    }


def write_search(directory: Path, result: SearchResult | Profile, length: int, fingerprint: Mapping[str, Any]) -> None:
    """Writes `batch_search.json`. If that fails, a warning says so."""
    record = {"fingerprint": fingerprint, "sequence_length": length, "result": asdict(result)}
    content = f"{json.dumps(record, indent=2)}\n".encode()
    keep_file(directory / SEARCH_FILE, content, "the next run will search again")


def found_before(directory: Path, fingerprint: Mapping[str, Any], kind: type[Result]) -> Result | None:
    """Collective: the result of an earlier search with this fingerprint, as rank 0 reads it."""
    found: Result | None = None
    if dist.get_rank() == 0:
        try:
            found = read_search(directory, fingerprint, kind)
        except ValueError as error:
            logger.warning("%s; searching again", error)
        if found is not None:
            file = directory / SEARCH_FILE
            logger.info("batch search · reused from %s (adaptive.reuse_search: False searches again)", file)
    return from_rank_0(found)


def read_search(directory: Path, fingerprint: Mapping[str, Any], kind: type[Result]) -> Result | None:
    """None if there is no such record. Raises ValueError for a file that `write_search` has not written."""
    path = directory / SEARCH_FILE
    try:
        record = read_json(path)
        # The fingerprint first: it says whether the rest is of this kind.
        if record is None or record["fingerprint"] != json.loads(json.dumps(fingerprint)):
            return None
        result = record["result"]
        probes, surfaces = ("probes", "lines") if kind is SearchResult else ("points", "surfaces")
        result[probes] = tuple(Probe(**{**each, "peak": Peak(**each["peak"])}) for each in result[probes])
        result[surfaces] = {name: Surface(**each) for name, each in result[surfaces].items()}
        return kind(**result)
    except KeyError as error:
        raise ValueError(f"{path} is not a valid search record (missing key {error})") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid search record ({error})") from error


def search_event(result: SearchResult, sequence_length: int, stage: str = "") -> Event:
    """The result of a search, for the journal."""
    named = f" · {stage}" if stage else ""
    rows = f"{count_of(result.rows, 'row')} of {sequence_length} tokens"
    return Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"batch search{named}: {rows} ({result.reason})",
        unit="rows",
        after=result.rows,
        peak_bytes=next(probe.peak.peak_bytes for probe in result.probes if probe.rows == result.rows),
        budget_bytes=result.budget_bytes,
    )


def profile_event(result: Profile, stage: str = "") -> Event:
    """A profile, for the journal."""
    named = f" · {stage}" if stage else ""
    fits = f"up to {result.constant_tokens} tokens fit at any length, more where the fitted surfaces allow"
    return Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"token budget{named}: {fits}",
        unit="bytes",
        after=result.limit_bytes,
        budget_bytes=result.budget_bytes,
    )
