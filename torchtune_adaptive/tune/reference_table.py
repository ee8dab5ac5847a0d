"""`adaptive.precompute_reference`: what the reference says of every pair of the dataset, found once and kept on disk.

    reference/log_probs.bin     one line of JSON: what it was made of, and a checksum of the rest
                                [pairs, 2] float32: log-probabilities of the chosen and the rejected answer
                                [pairs] int64: a CRC-32 of each pair

Every rank goes through its share of the dataset in the reference's own stage, with its limit and its recovery. The
numbers belong to indices, so neither the order of samples nor the number of ranks matters to whoever reads them.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from torchtune_adaptive.atomic_files import keep_file, reason
from torchtune_adaptive.checkpoints.identity import weights_in
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import BEFORE_THE_FIRST
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.oom import release
from torchtune_adaptive.engine.ranks import from_rank_0, sum_over_ranks
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import RunStopped, SampleError
from torchtune_adaptive.life.console import progress_bar, say
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.course import Parts, open_record, reference_limit
from torchtune_adaptive.tune.culprits import NamedSamples, check_sample
from torchtune_adaptive.tune.preference_stages import KEPT, REFERENCE
from torchtune_adaptive.tune.samples import PAIR, Sample

logger = logging.getLogger(__name__)

TABLE_FILE = "reference/log_probs.bin"
CHUNK = 256
"""Pairs that a rank runs before the ranks agree on how that went."""
LOOKED_AT = 16
"""Pairs that are read again before a table is believed to be that of the dataset."""
BYTES_PER_PAIR = 2 * 4 + 8


class MadeOf(TypedDict):
    """All that a table depends on, as JSON has it."""

    config: dict[str, object]
    weights: dict[str, object]
    pairs: int


@dataclass(frozen=True)
class Table:
    log_probs: Tensor
    marks: Tensor
    path: Path

    def complete(self, index: int, pair: Sample) -> Sample:
        """The pair with what the reference says of it."""
        if not self.knows(index, pair):
            check_sample(index, pair, PAIR)
            raise SampleError(
                f"sample {index} of the dataset has changed since {self.path} was written: remove that file, or, if "
                "the dataset returns a different sample on each read, set adaptive.precompute_reference: False"
            )
        return {**pair, KEPT: self.log_probs[index]}

    def knows(self, index: int, pair: Sample) -> bool:
        """Whether the pair is what it was when the reference was asked of it."""
        try:
            return mark_of(pair) == int(self.marks[index])
        except (LookupError, TypeError, ValueError, OverflowError):  # no pair at all, for which nobody was asked
            return False


def is_known(settings: Settings, dataset: NamedSamples) -> bool:
    """Collective: whether the run asks for what an earlier one has left; then each pair comes with it from now on."""
    if not settings.adaptive.precompute_reference:
        return False
    table = _known(_path(settings), _made_of(settings.config, len(dataset)), dataset)
    if table is not None:
        dataset.complete = table.complete
    return table is not None


def precompute_reference(parts: Parts, progress: Progress) -> None:
    """Collective: from now on each pair comes with what the reference says of it, and the reference is not needed."""
    dataset, path = parts.data.dataset, _path(parts.settings)
    open_record(parts, progress)
    pairs, began_s = count_of(len(dataset), "pair"), time.monotonic()
    say(f"{REFERENCE} · computing them for {pairs}, once before training")
    with parts.limited_memory() as memory, parts.data.naming_bad_samples(parts.model, last=CHUNK):
        table = _computed(parts, memory, path)
    if dist.get_rank() == 0:
        content = packed(table, _made_of(parts.settings.config, len(dataset)))
        if keep_file(path, content, "the next run will compute them again"):
            say(f"{REFERENCE} · computed for {pairs} in {time.monotonic() - began_s:.1f} s, saved to {path}")
    dataset.complete = table.complete
    asked = parts.stages.pop(REFERENCE)
    if asked.recovery is not parts.stages.training.recovery:
        asked.close()
    del asked  # or its model would stay
    release()


def _path(settings: Settings) -> Path:
    return Path(settings.output_dir) / TABLE_FILE


def _made_of(cfg: DictConfig, pairs: int) -> MadeOf:
    """All that a table depends on, but the dataset's content, of which each pair has a mark."""
    keys = ("model", "tokenizer", "dataset", "dtype")
    values = OmegaConf.to_container(OmegaConf.create({key: cfg.get(key) for key in keys}), resolve=True)
    weights = weights_in("reference", cfg.get("ref_checkpointer") or cfg.get("checkpointer"))
    return json.loads(json.dumps({"config": values, "weights": weights, "pairs": pairs}))  # type: ignore[no-any-return]


def _known(path: Path, made_of: MadeOf, dataset: NamedSamples) -> Table | None:
    """Collective: the table that an earlier run has left, if rank 0 finds it whole and made of the same."""
    content = from_rank_0(_content(path, made_of, dataset) if dist.get_rank() == 0 else None)
    if content is None:
        return None
    say(f"{REFERENCE} · reused from {path}")
    return unpacked(content, made_of, path)


def _content(path: Path, made_of: MadeOf, dataset: NamedSamples) -> bytes | None:
    """What is in a table that may be used; None, with the reason in the log, where there is none."""
    try:
        content = path.read_bytes()
        table = unpacked(content, made_of, path)
        every = max(1, len(dataset) // LOOKED_AT)
        if all(table.knows(at, dataset[at]) for at in range(0, len(dataset), every)):
            return content
        why = "the dataset has changed"
    except FileNotFoundError:
        return None
    except ValueError as error:
        why = str(error)
    except OSError as error:
        why = f"it cannot be read ({reason(error)})"
    logger.info("%s · recomputing, since %s cannot be reused: %s", REFERENCE, path, why)
    return None


def _computed(parts: Parts, memory: MemorySource | None, path: Path) -> Table:
    """Collective: each rank asks the reference of its share."""
    runner = parts.stages[REFERENCE]
    dataset, rank, ranks = parts.data.dataset, dist.get_rank(), dist.get_world_size()
    limit = reference_limit(parts, memory, CHUNK)
    runner.use_limit(limit or RowLimit(parts.settings.batch_size))
    runner.watch(memory)
    pairs, share = len(dataset), -(-len(dataset) // ranks)
    table = Table(torch.zeros(pairs, 2), torch.zeros(pairs, dtype=torch.int64), path)
    with progress_bar(REFERENCE, pairs, "pairs", shown=rank == 0) as bar:
        for start in range(0, share, CHUNK):
            indices = [rank + ranks * at for at in range(start, min(share, start + CHUNK))]
            _ask(runner, dataset, [index for index in indices if index < pairs], len(indices), table)
            bar.update(min(ranks * len(indices), pairs - bar.n))
    return Table(sum_over_ranks(table.log_probs), sum_over_ranks(table.marks), path)


def _ask(runner: StepRunner[Sample], dataset: NamedSamples, indices: list[int], count: int, table: Table) -> None:
    """Collective: fills these places of the table. All ranks run `count` pairs, so the last one here may come twice."""
    samples = [dict(dataset[index]) for index in indices or [0]]
    pairs = [*samples, *(dict(samples[-1]) for _ in range(count - len(samples)))]
    if runner.run(pairs, step=BEFORE_THE_FIRST).asked_to_stop:
        raise RunStopped("stopped while computing reference log-probabilities, before the first step")
    if indices:
        table.log_probs[indices] = torch.stack([pair[KEPT] for pair in pairs[: len(indices)]]).float().cpu()
        table.marks[indices] = torch.tensor([mark_of(pair) for pair in samples])


def mark_of(pair: Sample) -> int:
    """A checksum of the tokens and labels of a pair."""
    mark = 0
    for key in (key for sequence in PAIR.sequences for key in (sequence.tokens, sequence.labels)):
        values = np.asarray(pair[key], dtype=np.int64)
        mark = zlib.crc32(values.tobytes(), zlib.crc32(len(values).to_bytes(8, "little"), mark))
    return mark


def packed(table: Table, made_of: MadeOf) -> bytes:
    numbers = table.log_probs.numpy().tobytes() + table.marks.numpy().tobytes()
    head = {"made_of": made_of, "crc32": zlib.crc32(numbers)}
    return json.dumps(head, sort_keys=True).encode() + b"\n" + numbers


def unpacked(content: bytes, made_of: MadeOf, path: Path) -> Table:
    """The inverse of `packed`; raises ValueError for what is torn, or made of something else."""
    line, _, numbers = content.partition(b"\n")
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise ValueError("it is damaged")
    pairs = made_of["pairs"]
    if len(numbers) != pairs * BYTES_PER_PAIR or zlib.crc32(numbers) != head.get("crc32"):
        raise ValueError("it is truncated or belongs to another dataset")
    if head.get("made_of") != made_of or None in made_of["weights"].values():
        raise ValueError("it was made with a different model, weights, tokenizer or dataset")
    log_probs = np.frombuffer(numbers, np.float32, 2 * pairs).reshape(pairs, 2)
    marks = np.frombuffer(numbers, np.int64, pairs, offset=8 * pairs)
    return Table(torch.tensor(log_probs), torch.tensor(marks), path)
