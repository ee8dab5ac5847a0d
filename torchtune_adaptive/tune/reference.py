"""`adaptive.precompute_reference`: the reference's log-probabilities of every pair, computed once and kept on disk.

Every rank goes through its share of the dataset in the reference's own stage, with its limit and its recovery. The
numbers belong to indices, so neither the order of samples nor the number of ranks matters to later runs.
"""

from __future__ import annotations

import io
import json
import logging
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from torchtune_adaptive.atomic_files import keep_file, reason
from torchtune_adaptive.checkpoints.identity import weights_in
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import BEFORE_THE_FIRST
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.oom import release
from torchtune_adaptive.engine.ranks import from_rank_0, sum_over_ranks
from torchtune_adaptive.errors import RunStopped, SampleError
from torchtune_adaptive.life.console import progress_bar, say
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.bad_samples import NamedSamples
from torchtune_adaptive.tune.course import reference_limit
from torchtune_adaptive.tune.preference import KEPT, REFERENCE
from torchtune_adaptive.tune.samples import PAIR, Sample
from torchtune_adaptive.tune.trainer import Trainer

logger = logging.getLogger(__name__)

TABLE_FILE = "reference/log_probs.pt"
CHUNK = 256
"""Pairs that a rank runs before the ranks agree on how that went."""
LOOKED_AT = 16
"""Pairs that are read again before a table is believed to be that of the dataset."""


@dataclass(frozen=True)
class ReferenceTable:
    log_probs: Tensor
    """[pairs, 2] float32: of the chosen and the rejected answer."""
    marks: Tensor
    """[pairs] int64: a checksum of each pair."""
    path: Path

    def complete(self, index: int, pair: Sample) -> Sample:
        """The pair with its reference log-probabilities."""
        if not self.knows(index, pair):
            raise SampleError(
                f"sample {index} of the dataset has changed since {self.path} was written: remove that file, or, if "
                "the dataset returns a different sample on each read, set adaptive.precompute_reference: False"
            )
        return {**pair, KEPT: self.log_probs[index]}

    def knows(self, index: int, pair: Sample) -> bool:
        """Whether the pair is the one that the reference has seen."""
        return mark_of(pair) == int(self.marks[index])


def is_known(settings: Settings, dataset: NamedSamples) -> bool:
    """Collective: whether an earlier run has left the table that this run needs; then each pair comes with its share
    from now on."""
    if not settings.adaptive.precompute_reference:
        return False
    path = Path(settings.output_dir) / TABLE_FILE
    table = _left_behind(path, made_of(settings.config, len(dataset)), dataset) if dist.get_rank() == 0 else None
    table = from_rank_0(table)
    if table is None:
        return False
    say(f"{REFERENCE} · reused from {path}")
    dataset.complete = table.complete
    return True


def _left_behind(path: Path, wanted: str | None, dataset: NamedSamples) -> ReferenceTable | None:
    """The table of an earlier run; None, with the reason in the log, where it is of no use."""
    try:
        table = unpacked(path.read_bytes(), wanted, path)
        every = max(1, len(dataset) // LOOKED_AT)
        if all(table.knows(at, dataset[at]) for at in range(0, len(dataset), every)):
            return table
        why = "the dataset has changed"
    except FileNotFoundError:
        return None
    except ValueError as error:
        why = str(error)
    except OSError as error:
        why = f"it cannot be read ({reason(error)})"
    logger.info("%s · recomputing, since %s cannot be reused: %s", REFERENCE, path, why)
    return None


def precompute_reference(trainer: Trainer) -> None:
    """Collective: if the config asks for it, each pair comes with its reference log-probabilities from now on, and the
    reference is not needed."""
    dataset, settings, stages = trainer.data.dataset, trainer.run.settings, trainer.stages
    if REFERENCE not in stages or not settings.adaptive.precompute_reference:
        return
    path = Path(settings.output_dir) / TABLE_FILE
    trainer.run.open_record()
    pairs, began_s = count_of(len(dataset), "pair"), time.monotonic()
    say(f"{REFERENCE} · computing them for {pairs}, once before training")
    with trainer.limited_memory() as memory:
        table = _computed(trainer, memory, path)
    if dist.get_rank() == 0:
        content = packed(table, made_of(settings.config, len(dataset)))
        if keep_file(path, content, "the next run will compute them again"):
            say(f"{REFERENCE} · computed for {pairs} in {time.monotonic() - began_s:.1f} s, saved to {path}")
    dataset.complete = table.complete
    asked = stages.pop(REFERENCE)
    if asked.recovery is not stages.training.recovery:
        asked.close()
    del asked  # or its model would stay
    release()


def _computed(trainer: Trainer, memory: MemorySource | None, path: Path) -> ReferenceTable:
    """Collective: each rank runs its share of the pairs. All run equally many, so a rank's last one may come twice."""
    runner, dataset = trainer.stages[REFERENCE], trainer.data.dataset
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runner.use_limit(reference_limit(trainer, memory, CHUNK) or RowLimit(trainer.run.settings.batch_size))
    runner.watch(memory)
    total, share = len(dataset), -(-len(dataset) // ranks)
    log_probs, marks = torch.zeros(total, 2), torch.zeros(total, dtype=torch.int64)
    with progress_bar(REFERENCE, total, "pairs", shown=rank == 0) as bar:
        for start in range(0, share, CHUNK):
            places = [rank + ranks * at for at in range(start, min(share, start + CHUNK))]
            own = [place for place in places if place < total]
            pairs = [dict(dataset[index]) for index in own or [0]]
            pairs += [dict(pairs[-1]) for _ in range(len(places) - len(pairs))]
            if runner.run(pairs, step=BEFORE_THE_FIRST).asked_to_stop:
                raise RunStopped("stopped while computing reference log-probabilities, before the first step")
            if own:
                log_probs[own] = torch.stack([pair[KEPT] for pair in pairs])[: len(own)].float().cpu()
                marks[own] = torch.tensor([mark_of(pair) for pair in pairs[: len(own)]])
            bar.update(min(ranks * len(places), total - bar.n))
    return ReferenceTable(sum_over_ranks(log_probs), sum_over_ranks(marks), path)


def mark_of(pair: Sample) -> int:
    """A checksum of the tokens and labels of a pair."""
    mark = 0
    for key in (key for sequence in PAIR.sequences for key in (sequence.tokens, sequence.labels)):
        values = np.asarray(pair[key], dtype=np.int64)
        mark = zlib.crc32(values.tobytes(), zlib.crc32(len(values).to_bytes(8, "little"), mark))
    return mark


def made_of(cfg: DictConfig, pairs: int) -> str | None:
    """All that a table depends on, as JSON, except for the pairs, which have marks. None: the weights are not known."""
    sections = {key: cfg.get(key) for key in ("model", "tokenizer", "dataset", "dtype")}
    weights = weights_in("reference", cfg.get("ref_checkpointer") or cfg.get("checkpointer"))
    if None in weights.values():
        return None
    config = OmegaConf.to_container(OmegaConf.create(sections), resolve=True)
    return json.dumps({"config": config, "weights": weights, "pairs": pairs}, sort_keys=True)


def packed(table: ReferenceTable, origin: str | None) -> bytes:
    file, numbers = io.BytesIO(), {"log_probs": table.log_probs, "marks": table.marks}
    torch.save({"made_of": origin, "crc32": _checksum(**numbers), **numbers}, file)
    return file.getvalue()


def unpacked(content: bytes, wanted: str | None, path: Path) -> ReferenceTable:
    """The inverse of `packed`; raises ValueError for a damaged table, and for one that was made of something else."""
    try:
        saved = torch.load(io.BytesIO(content), weights_only=True)
        table = ReferenceTable(saved["log_probs"], saved["marks"], path)
        intact = saved["crc32"] == _checksum(table.log_probs, table.marks)
        origin = saved["made_of"]
    except Exception:  # noqa: BLE001 - torch reads bytes that may be anything
        intact, origin = False, None
    if not intact:
        raise ValueError("it is damaged")
    if wanted is None or origin != wanted:
        raise ValueError("it was made with a different model, weights, tokenizer or dataset")
    return table


def _checksum(log_probs: Tensor, marks: Tensor) -> int:
    """torch writes checksums of its own, and reads files without looking at them."""
    return zlib.crc32(marks.numpy().tobytes(), zlib.crc32(log_probs.numpy().tobytes()))
