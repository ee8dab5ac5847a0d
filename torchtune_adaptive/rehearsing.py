"""What gpu-rehearsal replaces in this package. pyproject.toml registers the three adapters.

In a rehearsal, one rank runs on a simulated GPU: there are no peers, and no kernel computes values. gpu-rehearsal calls
`adapt_engine` after the script has imported this package, `adapt_trainers` after it has imported
`torchtune_adaptive.hf`, and `adapt_recipes` in a recipe. The rest of the package has no
hooks for rehearsals, except weights that are `Unfilled` (`models/model.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.utils.data import Dataset

from torchtune_adaptive.engine import consistency, probes, snapshot
from torchtune_adaptive.engine.ranks import Agreement
from torchtune_adaptive.errors import AdaptiveError, ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Rehearsal(Protocol):
    """The part of `gpu_rehearsal.adapters.Rehearsal` that is used here."""

    folder_without_data: Path | None

    def record(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Add facts to the result of the rehearsal."""

    def trial(self) -> AbstractContextManager[None]:
        """Return a context whose steps are not those of training."""

    def replace(self, replacements: Mapping[Any, Any]) -> None:
        """Replace functions in every module that has imported them, or will."""


def adapt_engine(rehearsal: Rehearsal) -> None:
    """Replace functions whose results come from other ranks or from the device."""
    measure = probes.probing

    @contextmanager
    def probing(*args: Any) -> Iterator[Any]:
        with rehearsal.trial(), measure(*args) as found:
            yield found

    Agreement.gather = _gather  # type: ignore[method-assign]
    rehearsal.replace(
        {
            probes.probing: probing,
            consistency.compare_replicas: lambda _: None,
            snapshot.copies_on_host: lambda _: [],
            snapshot.checksums_of: lambda _: [],
        }
    )


def _gather(self: Agreement, row: Sequence[float]) -> list[tuple[float, ...]]:
    """Return the row of this rank for all ranks, or exchange rows if ranks are rehearsed together."""
    rows = [tuple(map(float, row))] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(rows) > 1:
        dist.all_gather_object(rows, rows[0])
    return rows


def adapt_trainers(rehearsal: Rehearsal) -> None:
    """Let one rank read all samples, take the lengths of generated rows from their padding, and accept losses of 0."""
    from torchtune_adaptive.hf import losses, samples

    losses.TwoSamples.shows = lambda *_: True  # type: ignore[method-assign]
    rehearsal.replace({samples.share_of_rank: range, samples.lengths_of_answers: lambda _: None})


def adapt_recipes(rehearsal: Rehearsal) -> None:
    """Record searches and errors, write no checkpoints, and replace data with `--without-data`."""
    from torchtune_adaptive.checkpoints import resuming, store
    from torchtune_adaptive.data import balancing
    from torchtune_adaptive.lifecycle import distributed, entry_point
    from torchtune_adaptive.loop import batch_size
    from torchtune_adaptive.report import tables

    read, report, record = entry_point.checked_config, entry_point.report_error, batch_size.record_search

    def checked_config(keys: Collection[str]) -> DictConfig:
        cfg = read(keys)
        if rehearsal.folder_without_data is None:
            return cfg
        text = f"without data: samples have {length_of(cfg)} tokens" + "; answers end at once" * has_rollouts(cfg)
        rehearsal.record("setting", {"text": text, "timed": not has_rollouts(cfg)})
        return with_stand_ins(cfg, rehearsal.folder_without_data)

    def report_error(error: AdaptiveError, message: str) -> None:
        rehearsal.record("message", {"text": message})
        report(error, message)

    def record_search(loop: Any, stage: str, values: dict[str, Any], table: str, *rest: Any) -> None:
        rehearsal.record("search", {"stage": stage, "text": table, "result": values})
        record(loop, stage, values, table, *rest)

    replacements: dict[Callable[..., Any], Callable[..., Any]] = {
        entry_point.checked_config: checked_config,
        entry_point.report_error: report_error,
        batch_size.record_search: record_search,
        tables.time_of: lambda _: "",  # no kernel runs
        balancing.balancer_of: lambda *_: None,
        distributed.store_of_this_start: dict,
        # no run may resume from a rehearsal
        resuming.begin_record: lambda *_: None,
        store.publish: lambda _, staged, __: shutil.rmtree(staged, ignore_errors=True),
    }
    rehearsal.replace(replacements)


STAND_INS = "torchtune_adaptive.rehearsing"
DEFAULT_TOKENS = 4096
SAMPLES = 4096
"""Samples of a rank: more than fit in a microbatch on any GPU, so that a search finds the limit."""
STEPS = 64
"""The epoch has this many steps, so that it does not end during a rehearsal."""


def length_of(cfg: DictConfig) -> int:
    """Return the number of tokens of each sample; in reinforcement learning, of each prompt."""
    from torchtune_adaptive.config.keys import value_at

    lengths = (value_at(cfg, key) for key in ("adaptive.sequence_length", "tokenizer.max_seq_len"))
    return int(next(filter(None, lengths), DEFAULT_TOKENS))


def has_rollouts(cfg: DictConfig) -> bool:
    """Return True for configs of PPO. Without a tokenizer, their answers end at once."""
    return "reward_and_value_model" in cfg


def with_stand_ins(given: DictConfig, folder: Path) -> DictConfig:
    """Return the config with stand-ins, and with all output in `folder`. Every sample has `length_of(given)` tokens."""
    from omegaconf import OmegaConf

    from torchtune_adaptive.config.components import COMPONENT

    cfg: dict[str, Any] = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    if "image" in str(cfg.get("collate_fn")):
        raise ConfigError(f"--without-data has no images for {cfg['collate_fn']}: rehearse with the dataset")
    (folder / "none").touch()
    files = {"checkpoint_dir": str(folder), "checkpoint_files": ["none"], "output_dir": str(folder)}
    for key in [key for key in cfg if key.endswith("checkpointer")]:
        cfg[key] = {COMPONENT: f"{STAND_INS}.NoWeights", **files, "model_type": "LLAMA3"}
    length, per_step = length_of(given), int(cfg["batch_size"]) * int(cfg.get("gradient_accumulation_steps") or 1)
    samples = int(os.environ.get("WORLD_SIZE", 1)) * max(SAMPLES, per_step * STEPS)
    return OmegaConf.create(
        {
            **cfg,
            "tokenizer": {COMPONENT: f"{STAND_INS}.NoTokenizer", "max_seq_len": length},
            "dataset": {COMPONENT: f"{STAND_INS}.SyntheticDataset", "lengths": [length], "samples": samples},
            "output_dir": str(folder),
            "metric_logger": {COMPONENT: "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
            "profiler": None,
            "run_val_every_n_steps": None,
            "shuffle": False,
            "resume_from_checkpoint": False,
        }
    )


TOKEN = 1
"""A token that every vocabulary contains, and that is not the padding token."""


class NoWeights:
    """A checkpointer that reads and writes no values."""

    def __init__(self, output_dir: str, **_: Any) -> None:
        self._folder = Path(output_dir)

    def load_checkpoint(self) -> dict[str, Any]:
        """Return a marker, with which parameters are allocated but not initialized."""
        from torchtune import training

        from torchtune_adaptive.models.model import Unfilled

        return {training.MODEL_KEY: Unfilled()}

    def save_checkpoint(self, *_: Any, epoch: int, **__: Any) -> None:
        """Create the folder of torchtune's weights and an empty file of the recipe's state."""
        from torchtune_adaptive.checkpoints.store import RECIPE_STATE, RECIPE_STATE_FILE

        for folder in f"epoch_{epoch}", RECIPE_STATE:
            (self._folder / folder).mkdir(parents=True, exist_ok=True)
        (self._folder / RECIPE_STATE / RECIPE_STATE_FILE).touch()


class NoTokenizer:
    """A tokenizer without vocabulary."""

    pad_id, eos_id, bos_id = 0, 0, TOKEN
    stop_tokens = (0,)

    def __init__(self, max_seq_len: int, **_: Any) -> None:
        self.max_seq_len = max_seq_len


class SyntheticDataset(Dataset[dict[str, Any]]):
    """Generates samples with the fields of all recipes; their lengths cycle through `lengths`."""

    def __init__(self, tokenizer: Any, *, lengths: Sequence[int], samples: int) -> None:
        from torchtune_adaptive.data.samples import PAIR, TEXT

        self._lengths, self._samples = list(lengths), samples
        self._fields = [each for kind in (TEXT, PAIR) for pair in kind.sequences for each in (pair.tokens, pair.labels)]

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self._lengths[index % len(self._lengths)]
        return {"mask": [False] * length, **{field: [TOKEN] * length for field in self._fields}}
