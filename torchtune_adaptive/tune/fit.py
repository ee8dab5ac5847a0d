"""How much fits: a search for rows, a profile of lengths, and the record by which a later run reuses either."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
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
from torchtune_adaptive.tune.trainer import Run

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

REUSED = ", reused from an earlier run"

Result = TypeVar("Result", SearchResult, Profile)


def rows(
    run: Run,
    step: TrainingStep[Any],
    memory: MemorySource,
    kind: Kind,
    *,
    most_rows: int,
    whole_step_rows: int | None = None,
    folder: str = "",
) -> SearchResult:
    """Collective: the most rows, up to `most_rows`, that every rank can train with.

    From `whole_step_rows` on, a step is one microbatch; None: it may have several whatever the rows. The search is
    recorded in this folder of `output_dir`, and in the journal of the run.
    """
    adaptive, length, stage = run.settings.adaptive, step.length, step.runner.stage
    options = {
        "strategy": adaptive.search,
        "round_to": adaptive.round_to,
        "max_rows": most_rows,
        "whole_step_rows": whole_step_rows,
    }
    file = SearchFile(run.settings, folder, fingerprint_of(run.settings.config, step, memory, options))
    result, reused = file.read(SearchResult), REUSED
    if result is None:
        reused = ""
        with _probing(stage, kind) as progress:
            result = find_max_batch_size(
                step,
                memory=memory,
                strategy=adaptive.search,
                round_to=adaptive.round_to,
                max_rows=most_rows,
                samples_per_step=run.settings.samples_per_step,
                whole_step_rows=whole_step_rows,
                progress=progress,
            )
        if dist.get_rank() == 0:
            logger.info("%s", search_table(result, length, stage, kind.noun))
            file.write(result, length)
            draw_search(file.directory, result, length, stage, kind.noun)
    count = f"{count_of(result.rows, 'row')} of {length} tokens ({result.reason})"
    event = Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"batch search{' · ' * bool(stage)}{stage}: {count}{reused}",
        unit="rows",
        after=result.rows,
        peak_bytes=peak_of(result),
        budget_bytes=result.budget_bytes,
    )
    run.journal.search(event)
    return result


def peak_of(result: SearchResult) -> int | None:
    """What the chosen rows have needed."""
    return next(probe.peak.peak_bytes for probe in result.probes if probe.rows == result.rows)


def profile(
    run: Run, step: TrainingStep[Any], memory: MemorySource, kind: Kind, *, most_rows: int, folder: str = ""
) -> Profile:
    """Collective: what microbatches of up to `most_rows` rows need over rows and length, recorded as a search is."""
    shorten, stage = run.settings.adaptive.oversize != "error", step.runner.stage
    options = {"most_rows": most_rows, "shorten": shorten, "padded": step.runner.kind.padded}
    file = SearchFile(run.settings, folder, fingerprint_of(run.settings.config, step, memory, options))
    result, reused = file.read(Profile), REUSED
    if result is None:
        reused = ""
        with _probing(stage, kind) as progress:
            result = profile_memory(step, memory=memory, most_rows=most_rows, shorten=shorten, progress=progress)
        if dist.get_rank() == 0:
            logger.info("%s", profile_table(result, stage, kind.length_suffix))
            file.write(result, step.length)
            draw_profile(file.directory, result, stage)
    fits = f"up to {result.constant_tokens} tokens fit at any length, more where the fitted surfaces allow"
    event = Event(
        kind=SEARCH,
        step=0,
        stage=stage or None,
        reason=f"token budget{' · ' * bool(stage)}{stage}: {fits}{reused}",
        unit="bytes",
        after=result.limit_bytes,
        budget_bytes=result.budget_bytes,
    )
    run.journal.search(event)
    return result


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
    cfg: DictConfig, step: TrainingStep[Any], memory: MemorySource, options: Mapping[str, object]
) -> dict[str, object]:
    """Collective: everything that the result of a search depends on."""
    # an Agreement allocates nothing, and a rank may have no memory left
    budgets = [int(budget) for (budget,) in Agreement(1).gather([memory.budget_bytes])]
    given = OmegaConf.create({key: cfg.get(key) for key in DEPENDS_ON})
    return {
        **OmegaConf.to_container(given, resolve=True),  # type: ignore[dict-item]
        **options,
        "stage": step.runner.stage,
        "sequence_length": step.length,
        "world_size": dist.get_world_size(),
        "device": torch.get_device_module(cfg.device).get_device_name() if on_gpu(cfg) else "cpu",
        "torch": torch.__version__,
        "budgets": [budget // CUDA_BUDGET_GRAIN for budget in budgets] if on_gpu(cfg) else budgets,
    }


class SearchFile:
    """`batch_search.json` in a directory: a later run takes the result over if its fingerprint is the same."""

    def __init__(self, settings: Settings, folder: str, fingerprint: Mapping[str, Any]) -> None:
        self.directory = Path(settings.output_dir) / folder
        self._path, self._fingerprint = self.directory / SEARCH_FILE, fingerprint

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
                logger.info("batch search · reused from %s; delete it to search again", self._path)
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
