"""Whether settings are as fast, one beside the other, as `adaptive_plan advise=True` says: small models on one core.

    python -m benchmarks --only advice

Seconds of this process are measured, not of the wall: what else the machine does hardly changes their order. What the
core can do is measured as well, on a matrix, on tensors that no cache holds, and on a step of few tokens, of which
nearly all is launching: what is tested is the prediction, and not what it would assume of a core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from benchmarks.results import Result, Row
from tests.recipes.plan.test_plan import recipe_step
from tests.recipes.running import demo_config
from tests.recipes.tracing import fake_step
from torchtune_adaptive.prediction import ONE_CORE, Card, Timing, as_tensor
from torchtune_adaptive.tune.parts import process_group

TOKENS, FEW_TOKENS = 256, 16
SIZES = ("embed_dim=256", "num_layers=4")
WIDE = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in SIZES]
CHECKPOINTED, SELECTIVE = "enable_activation_checkpointing=True", ("ac_mode=selective", "ac_option=2")
SETTINGS = {
    "1 row": ("full", 1, ()),
    "1 row, every 2nd layer": ("full", 1, SELECTIVE),
    "1 row, checkpointed": ("full", 1, (CHECKPOINTED,)),
    "4 rows": ("full", 4, ()),
    "4 rows, every 2nd layer": ("full", 4, SELECTIVE),
    "4 rows, checkpointed": ("full", 4, (CHECKPOINTED,)),
    "LoRA, 4 rows": ("lora", 4, ()),
    "LoRA, 4 rows, checkpointed": ("lora", 4, (CHECKPOINTED,)),
}


def run(pairs: int) -> Result:
    """Each setting again and again in turns, of which the shortest step counts."""
    measured = {name: min(each) for name, each in _in_turns(pairs).items()}
    core = this_core()
    rows: list[Row] = [
        {
            "setting": name,
            "predicted": rows * TOKENS / predicted_s(name, core),
            "measured": rows * TOKENS / measured[name],
        }
        for name, (_, rows, _) in SETTINGS.items()
    ]
    tau = kendalls_tau([(float(str(row["predicted"])), float(str(row["measured"]))) for row in rows])
    note = (
        f"tokens a CPU second of a small model, {TOKENS} tokens a row; Kendall's tau {tau:.2f}. The core, measured: "
        f"{core.flops / 1e9:.0f} GFLOP/s, {core.bytes_per_s / 1e9:.0f} GB/s, {1e6 * core.launch_s:.0f} us a launch"
    )
    return Result(rows, note)


def _in_turns(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name in SETTINGS:
            times[name].append(measured_s(name))
    return times


def kendalls_tau(pairs: list[tuple[float, float]]) -> float:
    """Pairs of pairs in the same order less those in the other, over all."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def config_of(name: str, folder: str) -> DictConfig:
    kind, _, overrides = SETTINGS[name]
    return demo_config(
        kind, Path(folder) / "run", *WIDE, "gradient_accumulation_steps=1", "clip_grad_norm=null", *overrides
    )


def measured_s(name: str, rows: int | None = None, tokens: int = TOKENS, steps: int = 3) -> float:
    """The shortest of a few steps in this process, by default of the setting's own rows."""
    kind, own_rows, _ = SETTINGS[name]
    try:
        with tempfile.TemporaryDirectory() as folder, recipe_step(kind, config_of(name, folder)) as (_, step):
            return shortest_s(partial(step, rows or own_rows, tokens), steps)
    finally:
        process_group.leave()


def shortest_s(work: Callable[[], object], times: int) -> float:
    return min(cpu_s(work) for _ in range(times))


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def predicted_s(name: str, core: Card) -> float:
    return _timed(core, counted(name, SETTINGS[name][1], TOKENS))


def counted(name: str, rows: int, tokens: int) -> Tensor:
    """The work of a step, by field and kernel."""
    with tempfile.TemporaryDirectory() as folder, fake_step(config_of(name, folder), world_size=1) as step:
        work = step.record(rows, tokens, counting=True).work
    assert work is not None
    table = as_tensor(work)
    table[1] *= tokens
    return table


def _timed(core: Card, work: Tensor) -> float:
    return Timing(core, half=False, link_bytes_per_s=1.0, ranks=1).seconds(work).likely


def this_core(times: int = 9) -> Card:
    """What one core of this machine does at most, and what it takes to launch a kernel."""
    matrix, large = torch.randn(1024, 1024), torch.randn(2**24)
    into = torch.empty_like(large)
    flops = 2 * 1024**3 / shortest_s(lambda: matrix @ matrix, times)
    bytes_per_s = 3 * large.nbytes / shortest_s(lambda: torch.add(large, large, out=into), times)
    core = replace(ONE_CORE, half_flops=flops, flops=flops, bytes_per_s=bytes_per_s, launch_s=0.0)
    work = counted("1 row", 1, FEW_TOKENS)
    waiting = measured_s("1 row", 1, FEW_TOKENS, times) - _timed(core, work)
    return replace(core, launch_s=waiting / int((work.sum(0) > 0).sum()))
