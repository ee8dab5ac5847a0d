"""How much fits: a search for rows, a profile of lengths, and the record by which a later run reuses either."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.atomic_files import keep_file, read_json
from torchtune_adaptive.config.keys import Settings, on_gpu
from torchtune_adaptive.engine.limits import Surface
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import OnProbe, TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.ranks import Agreement, from_rank_0
from torchtune_adaptive.engine.search import Peak, Probe, SearchResult
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.life.console import progress_bar
from torchtune_adaptive.report.journal import SEARCH, Event
from torchtune_adaptive.report.pictures import draw_profile, draw_search
from torchtune_adaptive.report.tables import profile_table, search_table
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.samples import Kind

logger = logging.getLogger(__name__)

SEARCH_FILE = "batch_search.json"
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

Result = TypeVar("Result", SearchResult, Profile)


def rows(
    step: TrainingStep[Any],
    memory: MemorySource,
    settings: Settings,
    kind: Kind,
    *,
    most_rows: int,
    whole_step_rows: int | None = None,
    stage: str = "",
    folder: str = "",
    record: Callable[[Event], None],
) -> int:
    """Collective: the most rows, up to `most_rows`, that every rank can train with.

    From `whole_step_rows` on, a step is one microbatch; None: it may have several whatever the rows. The search is
    recorded in this folder of `output_dir`, and as an event.
    """
    adaptive, length = settings.adaptive, step.length
    options = {
        "strategy": adaptive.search,
        "round_to": adaptive.round_to,
        "max_rows": most_rows,
        "whole_step_rows": whole_step_rows,
        "stage": stage,
    }
    file = SearchFile(Path(settings.output_dir) / folder, fingerprint_of(settings.config, length, memory, options))
    found = file.read(SearchResult) if adaptive.reuse_search else None
    reused = found is not None
    if found is None:
        with _probing(stage, kind) as progress:
            found = find_max_batch_size(
                step,
                memory=memory,
                strategy=adaptive.search,
                round_to=adaptive.round_to,
                max_rows=most_rows,
                samples_per_step=settings.samples_per_step,
                whole_step_rows=whole_step_rows,
                progress=progress,
            )
        if dist.get_rank() == 0:
            logger.info("%s", search_table(found, length, stage, kind.noun))
            file.write(found, length)
            draw_search(file.directory, found, length, stage, kind.noun)
    count = f"{count_of(found.rows, 'row')} of {length} tokens"
    chosen = next(probe for probe in found.probes if probe.rows == found.rows)
    event = Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"batch search{_named(stage)}: {count} ({found.reason}){REUSED * reused}",
        unit="rows",
        after=found.rows,
        peak_bytes=chosen.peak.peak_bytes,
        budget_bytes=found.budget_bytes,
    )
    record(event)
    return found.rows


def profile(
    step: TrainingStep[Any],
    memory: MemorySource,
    settings: Settings,
    kind: Kind,
    *,
    most_rows: int,
    stage: str = "",
    folder: str = "",
    record: Callable[[Event], None],
) -> Profile:
    """Collective: what microbatches of up to `most_rows` rows need over rows and length, recorded as a search is."""
    shorten = settings.adaptive.oversize != "error"
    options = {"most_rows": most_rows, "shorten": shorten, "padded": step.runner.kind.padded, "stage": stage}
    file = SearchFile(Path(settings.output_dir) / folder, fingerprint_of(settings.config, step.length, memory, options))
    found = file.read(Profile) if settings.adaptive.reuse_search else None
    reused = found is not None
    if found is None:
        with _probing(stage, kind) as progress:
            found = profile_memory(step, memory=memory, most_rows=most_rows, shorten=shorten, progress=progress)
        if dist.get_rank() == 0:
            logger.info("%s", profile_table(found, stage, kind.length_suffix))
            file.write(found, step.length)
            draw_profile(file.directory, found, stage)
    fits = f"up to {found.constant_tokens} tokens fit at any length, more where the fitted surfaces allow"
    event = Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"token budget{_named(stage)}: {fits}{REUSED * reused}",
        unit="bytes",
        after=found.limit_bytes,
        budget_bytes=found.budget_bytes,
    )
    record(event)
    return found


REUSED = ", reused from an earlier run"


def _named(stage: str) -> str:
    return f" · {stage}" if stage else ""


@contextmanager
def _probing(stage: str, kind: Kind) -> Iterator[OnProbe]:
    """Counts probes in a progress bar; an error says of which stage, and of which length, a row does not fit."""
    with progress_bar("batch search", None, "probes", shown=dist.get_rank() == 0) as bar:

        def on_probe(rows: int, measured: Peak | None) -> None:
            if measured is not None:
                bar.set_postfix_str(f"{rows} rows", refresh=False)
                bar.update()

        try:
            yield on_probe
        except OneRowDoesNotFitError as error:
            raise error.with_remarks(stage, kind.length_suffix.strip()) from None


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


class SearchFile:
    """`batch_search.json` in a directory: a later run takes the result over if its fingerprint is the same."""

    def __init__(self, directory: Path, fingerprint: Mapping[str, Any]) -> None:
        self.directory, self._path, self._fingerprint = directory, directory / SEARCH_FILE, fingerprint

    def write(self, result: SearchResult | Profile, length: int) -> None:
        """Writes the result. If that fails, a warning says so."""
        record = {"fingerprint": self._fingerprint, "sequence_length": length, "result": asdict(result)}
        keep_file(self._path, f"{json.dumps(record, indent=2)}\n".encode(), "the next run will search again")

    def read(self, kind: type[Result]) -> Result | None:
        """Collective: the result of an earlier search with this fingerprint, as rank 0 reads it."""
        result: Result | None = None
        if dist.get_rank() == 0:
            try:
                result = self._read(kind)
            except KeyError as error:
                logger.warning("%s is not a valid search record (missing key %s); searching again", self._path, error)
            except (AttributeError, TypeError, ValueError) as error:
                logger.warning("%s is not a valid search record (%s); searching again", self._path, error)
            if result is not None:
                logger.info("batch search · reused from %s (adaptive.reuse_search: False searches again)", self._path)
        return from_rank_0(result)

    def _read(self, kind: type[Result]) -> Result | None:
        record = read_json(self._path)
        # The fingerprint first: it says whether the rest is of this kind.
        if record is None or record["fingerprint"] != json.loads(json.dumps(self._fingerprint)):
            return None
        result = record["result"]
        probes, surfaces = ("probes", "lines") if kind is SearchResult else ("points", "surfaces")
        result[probes] = tuple(Probe(**{**each, "peak": Peak(**each["peak"])}) for each in result[probes])
        result[surfaces] = {name: Surface(**each) for name, each in result[surfaces].items()}
        return kind(**result)
