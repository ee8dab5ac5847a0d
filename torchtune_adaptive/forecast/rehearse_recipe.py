"""Rehearse the recipe of a request: run its search for the batch size, and then a few steps with the result."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import keys_of
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.errors import AdaptiveError, Remedy
from torchtune_adaptive.forecast.request import PlanRequest, PlanSettings
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.null_cuda import NullCudaError
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.start import RankSettings, rehearse
from torchtune_adaptive.rehearse.sweep import SweepRow
from torchtune_adaptive.tune.preference import POLICY

STAND_INS = "torchtune_adaptive.forecast.stand_ins"
SAMPLES = 4096
"""Samples of a rank in a step: more than fit on any GPU, so that the search finds the limit."""


@dataclass(frozen=True)
class Forecast:
    """The rehearsal of a request for one number of ranks, one length and one GPU."""

    request: PlanRequest
    rehearsal: RehearsalResult

    @property
    def fits(self) -> bool:
        """True if the recipe trained without running out of memory."""
        return self.rehearsal.fits

    @property
    def searches(self) -> Mapping[str, Mapping[str, Any]]:
        """The results of searches by stage; empty if the request has a batch size."""
        return {each["stage"]: each["result"] for each in self.rehearsal.searches}

    @property
    def recipe_error(self) -> str:
        """The error with which the recipe ended."""
        return self.rehearsal.message.replace(KEYS[Remedy.LARGER_BUDGET], "raise memory_limit (a larger GPU)")

    @property
    def verdict(self) -> str:
        """Return the result in one line, with the recipe's error if its search failed."""
        search_failed = self.request.batch_size is None and self.recipe_error
        return f"does not fit: {self.recipe_error}" if search_failed else self.rehearsal.verdict()

    @property
    def rows(self) -> int | None:
        """Rows of a microbatch in the stage that trains; None under a token budget, and if several stages train."""
        if self.request.batch_size is not None:
            return self.request.batch_size
        return next((self.searches[stage].get("rows") for stage in ("", POLICY) if stage in self.searches), None)

    @property
    def maxima(self) -> dict[str, int]:
        """The maxima over the steps, of peak memory and of allocator flushes."""
        names = ("allocated_bytes", "reserved_bytes", "flushes")
        return {name: max((step[name] for step in self.rehearsal.steps), default=0) for name in names}

    @property
    def row(self) -> SweepRow:
        """The row of this forecast in a table."""
        request, found, plan = self.request, self.rehearsal, self.request.plan
        reserved = self.maxima["reserved_bytes"] if self.fits else found.run_peaks["reserved_bytes"]
        rows = f"{count_of(self.rows, 'row')} of " if self.rows else ""
        label = f"{rows}{request.length} tokens {' '.join(request.changes)}".strip()
        price = (plan.price or {}).get(request.gpu.name)
        return SweepRow(request.gpu, request.ranks, found, self.fits, reserved, found.usable_bytes, price, label)


def rehearse_recipe(request: PlanRequest) -> Forecast:
    """Rehearse the recipe. Raise an AdaptiveError if it fails for a reason other than memory."""
    at = f"{count_of(request.ranks, 'rank')} of {request.gpu.name}, {request.length} tokens at most"
    print(f"rehearsing {' '.join(request.changes) or 'the config'} ({at})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="forecast-") as name:
        folder = Path(name)
        config, log = folder / "config.yaml", folder / "log.txt"
        OmegaConf.save(rehearsed_config(request, folder), config)
        with log.open("w") as output:
            try:
                rehearsal = rehearse(
                    ["-m", request.recipe.name, "--config", str(config)],
                    request.gpu,
                    RankSettings(ranks=request.ranks, overhead_bytes=request.overhead_bytes, steps=request.plan.steps),
                    output=output,
                    variables={"OMP_NUM_THREADS": "1"},
                )
            except NullCudaError as error:
                raise AdaptiveError(f"adaptive_plan runs the recipe on a null device: {error}") from error
        if rehearsal.interrupted:
            raise KeyboardInterrupt
        if request.recipe.trains_on_rollouts:  # rehearsed answers end at once, so the time of a step is unknown
            rehearsal = replace(rehearsal, traced={})
        forecast = Forecast(request, rehearsal)
        if not rehearsal.fits and not rehearsal.errors:
            printed = log.read_text().strip()
            *_, last = "", *printed.splitlines()
            raise AdaptiveError(forecast.recipe_error or f"{rehearsal.verdict()} ({last})\n{printed[-2000:]}")
        return forecast


def rehearsed_config(request: PlanRequest, folder: Path) -> DictConfig:
    """Return the config to rehearse, with stand-ins for weights, tokenizer and data, and all output in `folder`."""
    cfg: dict[str, Any] = OmegaConf.to_container(request.cfg, resolve=True)  # type: ignore[assignment]
    for key in keys_of(PlanSettings):
        cfg.pop(key, None)
    (folder / "none").touch()
    files = {"checkpoint_dir": str(folder), "checkpoint_files": ["none"], "output_dir": str(folder)}
    for key in [key for key in cfg if key.endswith("checkpointer")]:
        cfg[key] = {COMPONENT: f"{STAND_INS}.NoWeights", **files, "model_type": "LLAMA3"}
    per_step = int(cfg["batch_size"]) * int(cfg.get("gradient_accumulation_steps") or 1)
    samples = max(SAMPLES, per_step * (request.plan.steps + 1))  # the epoch must not end before the last step
    adaptive = cfg.get("adaptive") or {}
    by_tokens = adaptive.get("token_budget") is not None
    return OmegaConf.create(
        {
            **cfg,
            "tokenizer": {COMPONENT: f"{STAND_INS}.NoTokenizer", "max_seq_len": request.length},
            "dataset": {
                COMPONENT: f"{STAND_INS}.SyntheticDataset",
                "lengths": [request.length],
                "samples": request.ranks * samples // per_step * per_step,
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
            "use_maximum_batch_size": request.batch_size is None and not by_tokens,
            "adaptive": {
                **adaptive,
                # With a given batch size, the first out-of-memory error ends the run.
                **({"recover_from_oom": False} if request.batch_size else {}),
                "memory_limit": None,
                "sequence_length": None,
            },
        }
    )
