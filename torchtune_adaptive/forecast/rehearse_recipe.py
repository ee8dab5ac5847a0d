"""Rehearses the recipe of a question: its own search, then steps of what that has found."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.atomic_files import read_json
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import keys_of
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.errors import AdaptiveError, Remedy
from torchtune_adaptive.forecast.keys import PlanSettings
from torchtune_adaptive.forecast.question import Question
from torchtune_adaptive.forecast.which_recipe import trains_on_rollouts
from torchtune_adaptive.null_cuda import NullCudaError
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.start import rehearse
from torchtune_adaptive.tune.batch_size import SEARCH_FILE

STAND_INS = "torchtune_adaptive.forecast.stand_ins"
ERASE = "\r\x1b[K"
"""Tells a terminal to erase the line."""
SAMPLES = 4096
"""Samples of a rank: more than fit on any card."""

Search = Mapping[str, Any]
"""What a search has recorded: rows, fits_rows, reason, budget_bytes, probes; a profile: points, surfaces."""


@dataclass(frozen=True)
class Found:
    """What a rehearsal says about one number of ranks and one length: rows by the search, memory by steps after it."""

    question: Question
    rehearsed: RehearsalResult
    searches: Mapping[str, Search]
    """By stage, that of training under ""; none where a size was asked about."""
    complaint: str
    """What the recipe says where it does not train."""

    @property
    def fits(self) -> bool:
        return self.rehearsed.fits

    @property
    def why_not(self) -> str:
        """In the recipe's words, whose advice is for the size that a search begins with."""
        of_a_search = self.question.batch_size is None and self.complaint
        return f"does not fit: {self.complaint}" if of_a_search else self.rehearsed.verdict()

    @property
    def rows(self) -> int | None:
        """Rows of a microbatch in the stage that trains; None where the budget is one of tokens."""
        if self.question.batch_size is not None:
            return self.question.batch_size
        return self.searches.get("", {}).get("rows")

    @property
    def most(self) -> dict[str, int]:
        """Peaks and flushes of the steps."""
        names = ("allocated_bytes", "reserved_bytes", "flushes")
        return {name: max((step[name] for step in self.rehearsed.steps), default=0) for name in names}


def rehearse_recipe(question: Question) -> Found:
    """Raises AdaptiveError where the recipe refuses the config, for any other reason than memory."""
    with tempfile.TemporaryDirectory(prefix="forecast-") as name:
        folder = Path(name)
        config, log = folder / "config.yaml", folder / "log.txt"
        OmegaConf.save(rehearsed_config(question, folder), config)
        variables = {"OMP_NUM_THREADS": "1"}
        if question.plan.expandable_segments is not None:
            variables["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{question.plan.expandable_segments}"
        with log.open("w") as output, progress(log):
            try:
                rehearsed = rehearse(
                    ["-m", question.recipe, "--config", str(config)],
                    question.gpu,
                    ranks=question.ranks,
                    overhead_bytes=question.overhead_bytes,
                    steps=question.steps,
                    output=output,
                    variables=variables,
                )
            except NullCudaError as error:
                raise AdaptiveError(f"adaptive_plan rehearses the recipe on a null device: {error}") from error
        if rehearsed.interrupted:
            raise KeyboardInterrupt
        said = [line for line in log.read_text().splitlines() if line.startswith("error")]
        complaint = said[-1].partition(": ")[2] if said else ""
        complaint = complaint.replace(KEYS[Remedy.LARGER_BUDGET], "raise memory_limit (a larger card)")
        found = Found(question, rehearsed, _searches(folder), complaint)
        if not rehearsed.fits and not rehearsed.errors:
            printed = log.read_text().strip()
            *_, last = "", *printed.splitlines()
            raise AdaptiveError(found.complaint or f"{rehearsed.verdict()} ({last})\n{printed[-2000:]}")
        return found


@contextmanager
def progress(log: Path, every_s: float = 1.0) -> Iterator[None]:
    """On a terminal, show the seconds so far and the log's last line on stderr; the line is erased at the end."""
    if not sys.stderr.isatty():
        yield
        return
    done, began = threading.Event(), time.monotonic()

    def show() -> None:
        while not done.wait(every_s):
            *_, last = "", *log.read_text(errors="replace").split("\n")[:-1]
            line = f"rehearsing · {time.monotonic() - began:.0f} s · {''.join(filter(str.isprintable, last))}"
            print(f"{ERASE}{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        print(ERASE, end="", file=sys.stderr, flush=True)

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        done.set()
        shown.join()


def rehearsed_config(question: Question, folder: Path) -> DictConfig:
    """The config, with stand-ins for what a forecast does not have, and nothing that leaves the folder."""
    cfg: dict[str, Any] = OmegaConf.to_container(question.cfg, resolve=True)  # type: ignore[assignment]
    for key in keys_of(PlanSettings):
        cfg.pop(key, None)
    (folder / "none").touch()
    files = {"checkpoint_dir": str(folder), "checkpoint_files": ["none"], "output_dir": str(folder)}
    for key in [key for key in cfg if key.endswith("checkpointer")]:
        cfg[key] = {COMPONENT: f"{STAND_INS}.NoWeights", **files, "model_type": "LLAMA3"}
    a_step = int(cfg["batch_size"]) * int(cfg.get("gradient_accumulation_steps") or 1)
    samples = max(SAMPLES, a_step * (question.steps + 1))  # no epoch ends before the last step
    adaptive = cfg.get("adaptive") or {}
    by_tokens = adaptive.get("token_budget") is not None
    return OmegaConf.create(
        {
            **cfg,
            "tokenizer": {COMPONENT: f"{STAND_INS}.NoTokenizer", "max_seq_len": question.length},
            "dataset": {
                COMPONENT: f"{STAND_INS}.MadeUp",
                "lengths": question.lengths or [question.length],
                "samples": question.ranks * samples // a_step * a_step,
            },
            **({"reward_functions": [{COMPONENT: f"{STAND_INS}.worth"}]} if "reward_functions" in cfg else {}),
            "output_dir": str(folder),
            "metric_logger": {COMPONENT: "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
            "profiler": None,
            "seed": cfg.get("seed") or 0,
            "shuffle": False,
            "device": "cuda",
            "resume_from_checkpoint": False,
            "batch_increase_function": None,
            "max_steps_per_epoch": None,
            **({} if trains_on_rollouts(question.cfg) else {"epochs": 1}),
            "use_maximum_batch_size": question.batch_size is None and not by_tokens,
            "adaptive": {
                **adaptive,
                # "does it fit" is answered by the first out-of-memory error, "how often does it not" by all of them
                **({"recover_from_oom": False} if question.batch_size and not question.lengths else {}),
                "memory_limit": None,
                "sequence_length": None,
            },
        }
    )


def _searches(folder: Path) -> dict[str, Search]:
    """Records of searches by the stages that have a folder of their own, that of training first."""
    files = sorted(folder.rglob(SEARCH_FILE), key=lambda path: len(path.parts))
    found = {path.parent.relative_to(folder).name: read_json(path) for path in files}
    return {stage: record["result"] for stage, record in found.items() if record}
