"""Compare the token budget of AdaptiveTrainer with Online Dynamic Batching (ODB) 0.1.2, another library for Trainer.

Stock Trainer, AdaptiveTrainer and ODB train the same Llama for an epoch of the same samples, in one process on a CPU.
ODB is set up as in its example for Trainer: four data workers that prefetch 64 samples each. Every measurement
runs in a separate process, because ODB changes the class of the data loader. ODB is not part of the extra `bench`:

    pip install --no-deps online-dynamic-batching==0.1.2
    python -m benchmarks --only online_batching --pairs 3

- Batches: padding, optimizer updates, samples of each update, and how often each sample is trained.
- CPU time: that of a long epoch minus that of a short one, with the data workers.
- Too little memory: a MemoryMeter enforces the limit. ODB and AdaptiveTrainer get the same budget, which is too large.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

from benchmarks.packing import DIALOGUES, INSTRUCTIONS, LONGEST, Lengths
from benchmarks.results import Result, compared
from benchmarks.trainer import HEADS, SIZES

NAMES = ("stock", "ours", "ODB")
ROWS = 8
BUDGET = ROWS * LONGEST
TOO_LARGE = 4 * BUDGET
MEMORY = "200MiB"
"""`BUDGET` fits into it, and `TOO_LARGE` does not."""
EPOCH = 2048
"""Samples of an epoch whose batches are counted."""
SHORT, LONG = 256, 768
"""Samples of the two epochs that are timed; multiples of the samples that ODB sorts at a time."""
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
"""Model of the epochs that are counted."""
WORKERS, PREFETCH = 4, 64
NOTE = (
    "budget: tokens of a microbatch, with padding; rows of stock. budget used: the limit at the end of the run. "
    "padding: share of all tokens. trained once: samples that were trained exactly once. CPU s: of "
    f"{LONG - SHORT} samples, with the data workers, median. ratio: CPU seconds relative to stock. ODB runs with "
    "no_warmup=True, except in rows with `warm-up`: by default, the first 2,432 samples come from smaller buffers. "
    f"Rows with `memory`: about {BUDGET} tokens fit into it"
)


@dataclass(frozen=True)
class Case:
    """A run of one epoch."""

    trainer: str
    lengths: Lengths
    samples: int
    tiny: bool = False
    budget: int | str = BUDGET
    limited: bool = False
    warm_up: bool = False
    """Whether ODB fills its buffer gradually, which is its default."""


@dataclass
class Epoch:
    """What happened in a run."""

    cpu_s: float
    padding: float
    passes: int
    samples_of_updates: list[int]
    trained_once: int
    recoveries: int
    budget: int | None
    error: str


def run(pairs: int) -> Result:
    if find_spec("odb") is None:
        raise SystemExit("ODB is not installed; pip install --no-deps online-dynamic-batching==0.1.2")
    times = [timed(NAMES[:: 1 if pair % 2 else -1]) for pair in range(pairs)]
    rows = [counted(Case(name, lengths, EPOCH, tiny=True)) for lengths in (INSTRUCTIONS, DIALOGUES) for name in NAMES]
    for row, name in zip(rows, NAMES, strict=False):
        row["CPU s"] = statistics.median(each[name] for each in times)
        row |= compared([(each["stock"], each[name]) for each in times])
    warm_up = Case("ODB", INSTRUCTIONS, EPOCH, tiny=True, warm_up=True)
    limited = Case("ODB", INSTRUCTIONS, SHORT, budget=TOO_LARGE, limited=True, warm_up=True)
    auto = replace(limited, trainer="ours", budget="auto")
    rows += [counted(case) for case in (warm_up, limited, replace(limited, trainer="ours"), auto)]
    columns = dict.fromkeys(column for row in rows for column in row)
    return Result([{column: row.get(column) for column in columns} for row in rows], NOTE)


def timed(names: Sequence[str]) -> dict[str, float]:
    """Return the CPU seconds of each trainer, measured in this order."""
    return {name: in_a_process(seconds, Case(name, INSTRUCTIONS, LONG)) for name in names}


def seconds(case: Case) -> float:
    """Return the CPU seconds of a long epoch minus those of a short one."""
    short = train(replace(case, samples=SHORT)).cpu_s
    return train(case).cpu_s - short


def counted(case: Case) -> dict[str, Any]:
    """Return the figures of an epoch as a row of results."""
    epoch = in_a_process(train, case)
    updates = epoch.samples_of_updates
    return {
        "lengths": case.lengths.name,
        "trainer": case.trainer + ", warm-up" * (case.trainer == "ODB" and case.warm_up),
        "memory": MEMORY if case.limited else None,
        "samples": case.samples,
        "budget": case.budget if case.trainer != "stock" else ROWS,
        "budget used": epoch.budget,
        "padding": epoch.padding,
        "forward passes": epoch.passes,
        "updates": len(updates),
        "fewest samples": min(updates),
        "median samples": statistics.median(updates),
        "most samples": max(updates),
        "trained once": epoch.trained_once,
        "recoveries": epoch.recoveries,
        "error": epoch.error,
    }


def in_a_process(function: Callable[[Case], Any], case: Case) -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.hf.trainers", "odb.integrations.hf"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, case).result()


class Samples(list[dict[str, list[int]]]):
    """Samples of a dataset. Since torch 2.15, a data worker gets the dataset in a list, from which it pops it. ODB
    0.1.2 passes the dataset itself to torch's private function, which fails without this method."""

    def pop(self, *_: Any) -> Any:
        return self


def samples_of(lengths: Lengths, count: int) -> Samples:
    """Return samples that begin with their index, in two tokens."""
    draw = random.Random(0)
    vocabulary = SIZES["vocab_size"]
    rows = Samples()
    for index in range(count):
        length = lengths.draw_length(draw)
        tokens = [index % vocabulary, index // vocabulary, *draw.choices(range(vocabulary), k=length - 2)]
        rows.append({"input_ids": tokens, "labels": [-100] * (length // 2) + tokens[length // 2 :]})
    return rows


def train(case: Case) -> Epoch:
    """Train one epoch, and count what the model gets."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, set_seed
    from transformers.utils.logging import set_verbosity_error

    from tests.hf.trainers import arguments, collate
    from torchtune_adaptive.engine.memory import memory_within
    from torchtune_adaptive.formatting import parse_size
    from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer

    torch.set_num_threads(1)
    set_verbosity_error()
    set_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, "num_hidden_layers": 2, **(TINY if case.tiny else {})}))
    odb = case.trainer == "ODB"
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []
    update_ends = [0]
    loader = None

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if odb and case.limited and len(update_ends) == 1:  # the workers exist: they inherit no meter
                limit = parse_size(MEMORY, "memory")
                stack.enter_context(memory_within(limit, torch.device("cpu"), [*model.parameters(), *model.buffers()]))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            update_ends.append(len(passes))

    def watch(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            passes.append((inputs["input_ids"], inputs["attention_mask"]))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = {
            "model": model,
            "train_dataset": samples_of(case.lengths, case.samples),
            "data_collator": collate,
            "callbacks": [Watch()],
            "args": arguments(
                folder,
                per_device_train_batch_size=1 if odb else ROWS,
                gradient_accumulation_steps=1 if odb else case.lengths.samples_per_step // ROWS,
                max_steps=-1,
                num_train_epochs=1,
                learning_rate=1e-3,
                optim="adamw_torch",
                logging_strategy="steps",
                dataloader_num_workers=WORKERS,
            ),
        }
        if case.trainer == "ours":
            adaptive = AdaptiveArguments(token_budget=case.budget, memory_limit=MEMORY if case.limited else None)
            trainer = AdaptiveTrainer(**options, adaptive=adaptive)
        else:
            trainer = Trainer(**options)
        if odb:
            from odb.integrations.hf import enable_odb

            loader = DataLoader(
                options["train_dataset"],
                collate_fn=collate,
                shuffle=True,
                num_workers=WORKERS,
                prefetch_factor=PREFETCH,
            )
            enable_odb(trainer, train_dataloader=loader, token_budget=case.budget, no_warmup=not case.warm_up)
        trainer.remove_callback(PrinterCallback)
        began, error = cpu_seconds(), ""
        try:
            trainer.train()
        except torch.OutOfMemoryError as out_of_memory:
            error = str(out_of_memory)
        log = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
        del trainer, options, loader
        gc.collect()  # ends the data workers
        spent = cpu_seconds() - began
    return epoch_of(passes, update_ends, spent, log, error, case)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def epoch_of(
    passes: Sequence[Any], update_ends: Sequence[int], cpu_s: float, log: Any, error: str, case: Case
) -> Epoch:
    """Return the figures of a run from the tokens and mask of each pass, and the passes before each update."""
    updates = [last_attempt(passes[start:end]) for start, end in pairwise(update_ends)]
    done = [each for update in updates for each in update]
    tokens, real = sum(mask.numel() for _, mask in done), sum(int(mask.sum()) for _, mask in done)
    times = Counter(each for ids, _ in done for each in indices(ids))
    return Epoch(
        cpu_s=cpu_s,
        padding=1 - real / tokens,
        passes=len(done),
        samples_of_updates=[sum(len(ids) for ids, _ in update) for update in updates],
        trained_once=sum(count == 1 for count in times.values()),
        recoveries=log.get("oom_recoveries", 0),
        budget=log.get("microbatch_tokens", ROWS if case.trainer == "stock" else case.budget),
        error=error,
    )


def last_attempt(passes: Sequence[Any]) -> list[Any]:
    """Return the passes of an update without those that were repeated: backwards, until a sample comes again."""
    seen: set[int] = set()
    kept = []
    for ids, mask in reversed(passes):
        if not seen.isdisjoint(found := indices(ids)):
            break
        seen.update(found)
        kept.append((ids, mask))
    return kept


def indices(ids: Any) -> list[int]:
    """Return the index of the sample in each row."""
    return [first + SIZES["vocab_size"] * second for first, second in ids[:, :2].tolist()]
