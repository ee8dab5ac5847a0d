"""Whether settings are as fast, one beside the other, as `adaptive_plan advise=True` says: small models on one core.

    python -m benchmarks --only advice

Seconds of this process are measured, not of the wall: what else the machine does hardly changes their order.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

from omegaconf import DictConfig

from benchmarks.results import Result, Row
from tests.recipes.plan.test_plan import NO_ACCUMULATION, recipe_step
from tests.recipes.running import demo_config
from tests.recipes.tracing import fake_step
from torchtune_adaptive.prediction import ONE_CORE, Timing, as_tensor
from torchtune_adaptive.tune.parts import process_group

TOKENS = 256
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
    rows: list[Row] = [
        {"setting": name, "predicted": rows * TOKENS / predicted_s(name), "measured": rows * TOKENS / measured[name]}
        for name, (_, rows, _) in SETTINGS.items()
    ]
    tau = kendalls_tau([(float(str(row["predicted"])), float(str(row["measured"]))) for row in rows])
    return Result(rows, f"tokens a CPU second of a small model, {TOKENS} tokens a row; Kendall's tau {tau:.2f}")


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
    return demo_config(kind, Path(folder) / "run", *WIDE, *NO_ACCUMULATION, *overrides)


def measured_s(name: str, steps: int = 3) -> float:
    """The shortest of a few steps in this process."""
    kind, rows, _ = SETTINGS[name]
    try:
        with tempfile.TemporaryDirectory() as folder, recipe_step(kind, config_of(name, folder)) as (_, step):
            return min(cpu_s(partial(step, rows, TOKENS)) for _ in range(steps))
    finally:
        process_group.leave()


def cpu_s(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def predicted_s(name: str) -> float:
    with tempfile.TemporaryDirectory() as folder, fake_step(config_of(name, folder), world_size=1) as step:
        work = step.record(SETTINGS[name][1], TOKENS, counting=True).work
    assert work is not None
    counted = as_tensor(work)
    counted[1] *= TOKENS
    return Timing(ONE_CORE, half=False, link_bytes_per_s=1.0, ranks=1).seconds(counted).likely
