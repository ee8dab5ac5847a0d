"""Compare the step time of transformers' Trainer with and without the mixin, alternating in one process group.

Goal 0.98 to 1.02 in the median of CPU seconds. Both kinds of runs train the same model on the same samples in the
same microbatches. A pair is the ratio of two neighbouring runs: of the median CPU seconds of steps 5 to 15. What the
first step takes in addition, mostly for the loss check, is reported separately. Figures are those of rank 0.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.clock import Moment
from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks

SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
TOKENS = 256
WARM_UP, STEPS = 4, 15


def run(pairs: int) -> Result:
    note = (
        "ratio: CPU seconds of AdaptiveTrainer over Trainer; wall ratio: of median step times; start: CPU seconds that "
        "the first step takes more than with Trainer, divided by those of 100 steps"
    )
    cases = [("one process", 1, 2), ("FSDP2", 2, 1), ("FSDP2", 2, 4), ("DDP", 2, 1), ("DDP", 2, 4)]
    return Result([measure(*case, pairs) for case in cases], note)


def measure(placement: str, ranks: int, microbatches: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        told = run_on_ranks(
            ranks, time_both, placement, microbatches, Path(folder), pairs, timeout_s=600, in_group=False
        )
    times: list[tuple[Moment, Moment]] = [(stock, ours) for (stock, _), (ours, _) in told[0]]
    return {
        "placement": placement,
        "ranks": ranks,
        "microbatches": microbatches,
        "stock cpu ms": statistics.median(stock.cpu_s for stock, _ in times) * 1e3,
        "ours cpu ms": statistics.median(ours.cpu_s for _, ours in times) * 1e3,
        **compared([(stock.cpu_s, ours.cpu_s) for stock, ours in times]),
        "wall ratio": compared([(stock.wall_s, ours.wall_s) for stock, ours in times])["ratio"],
        "start": statistics.median((first - of_stock) / ours.cpu_s / 100 for (_, of_stock), (ours, first) in told[0]),
    }


def time_both(
    placement: str, microbatches: int, folder: Path, pairs: int, **options: Any
) -> list[tuple[tuple[Moment, float], tuple[Moment, float]]]:
    """Collective: time a step with stock and with ours. The order alternates, and the first pair warms up."""
    from transformers import Trainer

    from tests.hf.trainers import use_fsdp2
    from torchtune_adaptive.hf import AdaptiveTrainer

    if placement == "FSDP2":
        use_fsdp2()
    times = []
    for pair in range(pairs + 1):
        order = (Trainer, AdaptiveTrainer) if pair % 2 else (AdaptiveTrainer, Trainer)
        taken = {kind: time_of_a_step(kind, microbatches, folder, **options) for kind in order}
        times.append((taken[Trainer], taken[AdaptiveTrainer]))
    return times[1:]


def time_of_a_step(kind: type, microbatches: int, folder: Path, **changes: Any) -> tuple[Moment, float]:
    """Collective: return the time of a step, and the additional CPU seconds of the first step."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
    from transformers.utils.logging import set_verbosity_error

    from tests.hf.trainers import arguments

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            moments.append(Moment(time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(Moment(time.perf_counter(), time.process_time()))

    moments: list[Moment] = []
    set_verbosity_error()
    set_seed(7)
    rows = [[1 + (start + step) % 1000 for step in range(TOKENS)] for start in range(STEPS * microbatches * 4)]
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": microbatches,
        "max_steps": STEPS,
        **changes,
    }
    kind(
        model=LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)),
        args=arguments(folder, **{**options, **changes}),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Clock()],
    ).train()
    assert len(moments) == STEPS + 1
    durations = {
        number: Moment(end.wall_s - begin.wall_s, end.cpu_s - begin.cpu_s)
        for number, (begin, end) in enumerate(itertools.pairwise(moments), 1)
    }
    steps = [each for number, each in durations.items() if number > WARM_UP]
    step = Moment(statistics.median(each.wall_s for each in steps), statistics.median(each.cpu_s for each in steps))
    return step, durations[1].cpu_s - step.cpu_s
