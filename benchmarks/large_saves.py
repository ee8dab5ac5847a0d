"""Measure how long training waits for a checkpoint of 8.3 GB, saved and resumed by our recipe and by stock's.

Each side runs alone in separate processes, since two models of this size do not fit into 24 GiB. By default there is
one round per side: a save takes a minute.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results import Result
from benchmarks.saves import have_optimizer_state, save_as_ours, save_as_stock, timed
from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.running import demo_config, load_ours, load_stock, stock_on_cpu
from torchtune_adaptive.demo.model import demo_model

RANKS = 2
SIZES = {"embed_dim": 2048, "num_layers": 12, "num_heads": 16, "num_kv_heads": 16, "intermediate_dim": 6656}
MODEL = (
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
)
RESUMED = {
    "ours": ("resume_from_checkpoint=auto",),
    "stock": (
        "resume_from_checkpoint=True",
        "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]",
    ),
}


def run(pairs: int) -> Result:
    note = (
        f"{RANKS} ranks. pause: until training continues. start, resume: until a recipe could train, from initial "
        "weights and from the checkpoint; empty if memory did not suffice. Ours syncs to disk and checksums every "
        "byte; stock's does neither"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_weights(Path(folder) / "weights" / "demo.pt")
        rows = [measure(side, Path(folder) / side, max(1, pairs // 5)) for side in ("stock", "ours")]
    return Result(rows, note)


def make_weights(path: Path) -> None:
    path.parent.mkdir()
    torch.manual_seed(0)
    torch.save(demo_model(**SIZES).state_dict(), path)


def measure(side: str, folder: Path, rounds: int) -> dict[str, Any]:
    measured = []
    for _ in range(rounds):
        start_s, pause_s = run_on_ranks(RANKS, start_and_save, side, folder, timeout_s=300, in_group=False)[0]
        saved = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
        try:
            options = RESUMED[side]
            resume_s, _ = run_on_ranks(RANKS, start_and_save, side, folder, options, timeout_s=300, in_group=False)[0]
        except RankFailed:  # in stock, each rank holds the whole optimizer state, which may not fit in memory
            resume_s = None
        measured.append((start_s, pause_s, resume_s))
        shutil.rmtree(folder)
    starts, pauses, resumes = zip(*measured, strict=True)
    return {
        "recipe": side,
        "GB": saved / 1e9,
        "pause s": statistics.median(pauses),
        "start s": statistics.median(starts),
        "resume s": None if None in resumes else statistics.median(resumes),
    }


def start_and_save(side: str, folder: Path, resumed: tuple[str, ...] = ()) -> tuple[float, float]:
    """Collective: return the seconds until the recipe could train, and the pause for a save unless it resumes."""
    config = demo_config("full", folder, *MODEL, *resumed, "epochs=2")
    ours = side == "ours"
    with nullcontext() if ours else stock_on_cpu():
        began = time.perf_counter()
        recipe: Any = load_ours("full")(config) if ours else load_stock("full")(config)
        recipe.setup(*(() if ours else (config,)))
        dist.barrier()
        start_s = time.perf_counter() - began
        if resumed:
            return start_s, 0.0
        if ours:
            have_optimizer_state(recipe.model, recipe.optimization.checkpointed)
            pause = timed(lambda: save_as_ours(recipe, 0), dist.group.WORLD)
        else:
            have_optimizer_state(recipe._model, recipe._optimizer)
            pause = timed(lambda: save_as_stock("full", recipe, 0), dist.group.WORLD)
    return start_s, pause.wall_s
