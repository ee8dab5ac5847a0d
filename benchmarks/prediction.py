"""What `adaptive_plan` foresees of a step's memory, beside what the step takes: the recipes on two CPU ranks.

    python -m benchmarks --only prediction

No GPU: where a prediction is for CPUs, the meter that counts every live storage says what is true.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.results import Result, Row
from tests.ranks import run_on_ranks
from tests.recipes.plan.test_plan import SIZES, metered_peaks, predicted_peaks
from tests.recipes.running import demo_config

RANKS = 2
# so that a shard of each projection is whole blocks of 64 weights in whole blocks of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4")
WIDE_ENOUGH_FOR_NF4 = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES]
CONFIGS = {
    "full": ("full",),
    "full, checkpointed": ("full", "enable_activation_checkpointing=True"),
    "full, one microbatch": ("full", "gradient_accumulation_steps=1", "clip_grad_norm=null"),
    "lora": ("lora",),
    "qlora": ("lora", "dtype=bf16", "model.quantize_base=True", *WIDE_ENOUGH_FOR_NF4),
}
MIB = 2**20


def run(pairs: int) -> Result:
    """Bytes are counted, not timed: one measurement is as good as five."""
    rows = [row for name in CONFIGS for row in compare(name)]
    return Result(rows, f"peak of a step of the demo's model on {RANKS} ranks; difference: planned less measured")


def compare(name: str) -> list[Row]:
    kind, *overrides = CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        cfg = demo_config(kind, Path(folder) / "run", *overrides)
        measured = run_on_ranks(RANKS, metered_peaks, kind, cfg, timeout_s=200, in_group=False)[0]
    planned = predicted_peaks(cfg, world_size=RANKS)
    return [
        {
            "config": name,
            "rows × tokens": f"{rows} × {tokens}",
            "planned MiB": ours / MIB,
            "measured MiB": real / MIB,
            "difference bytes": ours - real,
        }
        for (rows, tokens), ours, real in zip(SIZES, planned, measured, strict=True)
    ]
