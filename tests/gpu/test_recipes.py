"""Whole runs of the recipes on a GPU, in one process with NCCL, with unlimited and with limited memory."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpu.real_steps import side_by_side, use
from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log
from tests.recipes.running import demo_config, load_stock, run_ours

SIZES = {"embed_dim": 512, "intermediate_dim": 1024, "vocab_size": 32_768}
MODEL = tuple(f"{section}.{name}={size}" for name, size in SIZES.items() for section in ("model", "checkpointer.sizes"))
PLAIN = (
    "device=cuda",
    "dtype=bf16",
    "log_peak_memory_stats=True",
    "optimizer.lr=1e-4",
    "clip_grad_norm=1.0",
    "batch_size=16",
    "gradient_accumulation_steps=1",
    "dataset.samples=96",
    "tokenizer.max_seq_len=512",
)
VARIANTS = {
    "full": ("full",),
    "full, compiled": ("full", "compile=True"),
    "full, offloading": ("full", "enable_activation_checkpointing=True", "enable_activation_offloading=True"),
    "lora": ("lora",),
    "lora, offloading": ("lora", "enable_activation_checkpointing=True", "enable_activation_offloading=True"),
}
STEPS = 96 // 16
TOO_LITTLE = 0.8
"""Share of the memory that the largest step allocates."""
CLOSE = 0.01
"""Tolerance: bf16 sums differ with other microbatches."""


class Runs(NamedTuple):
    unlimited: list[dict[str, float]]
    limited: list[dict[str, float]]
    fused: bool

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.unlimited]


def train(kind: str, folder: Path, *changes: str) -> bool:
    """Run a recipe; return True if its optimizer was fused."""
    use("cuda")
    recipe = run_ours(kind, demo_config(kind, folder, *MODEL, *PLAIN, *changes))
    return bool(recipe.optimization.checkpointed.defaults["fused"])


def train_stock(kind: str, folder: Path) -> None:
    use("cuda")
    cfg = demo_config(kind, folder, *MODEL, *PLAIN)
    recipe = load_stock(kind)(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()


def train_twice(folder: Path, kind: str, *changes: str) -> Runs:
    """Train with unlimited memory, then with less than the largest step needs, in separate processes."""
    fused = run_on_ranks(1, train, kind, folder / "unlimited", *changes, timeout_s=200, in_group=False)[0]
    unlimited = read_log(folder / "unlimited" / "log.jsonl")
    limit_gib = TOO_LITTLE * max(step["peak_memory_alloc"] for step in unlimited)
    limited = (*changes, f"adaptive.memory_limit={limit_gib:.3f}GiB")
    run_on_ranks(1, train, kind, folder / "limited", *limited, timeout_s=200, in_group=False)
    return Runs(unlimited, read_log(folder / "limited" / "log.jsonl"), fused)


@pytest.fixture(scope="module")
def runs(cuda: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Runs]]]:
    folders = {name: tmp_path_factory.mktemp("runs") for name in VARIANTS}
    with side_by_side(lambda name: train_twice(folders[name], *VARIANTS[name]), VARIANTS) as found:
        yield found


@pytest.mark.real_gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_run_with_limited_memory_recovers_to_the_losses_of_an_unlimited_run(
    runs: Mapping[str, Future[Runs]], name: str
) -> None:
    unlimited, limited, fused = runs[name].result()
    assert fused
    assert len(unlimited) == STEPS
    assert unlimited[-1]["oom_recoveries"] == 0
    assert limited[-1]["oom_recoveries"] > 0
    for step, expected in zip(limited, unlimited, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=CLOSE)


@pytest.mark.real_gpu
@pytest.mark.parametrize("name", ["full, compiled", "full, offloading"])
def test_compile_and_offloading_do_not_change_losses(runs: Mapping[str, Future[Runs]], name: str) -> None:
    assert runs[name].result().losses() == pytest.approx(runs["full"].result().losses(), rel=CLOSE)


@pytest.mark.real_gpu
def test_losses_are_those_of_the_stock_recipe(runs: Mapping[str, Future[Runs]], tmp_path: Path) -> None:
    run_on_ranks(1, train_stock, "full", tmp_path / "stock", timeout_s=120, in_group=False)
    stock = [step["loss"] for step in read_log(tmp_path / "stock" / "log.jsonl")]
    assert runs["full"].result().losses() == pytest.approx(stock, rel=1e-3)
