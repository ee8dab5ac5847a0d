"""torchtune's configs for images (llama3_2_vision) on two ranks, compared with torchtune's recipe. Samples have one or
two images of one to four tiles.

torchtune's encoder does not mask the tiles that pad an image, so the loss of a sample depends on the largest image in
its batch. Each run is therefore compared with a run of torchtune's recipe that has the same batches.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.ranks import run_on_ranks, use_next_port
from tests.recipes import stock_configs
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, SGD, run_ours, run_stock
from tests.recipes.stock_configs import RandomTiles, import_model, offline, on_cpu, write_checkpoint

ROWS, ROWS_PER_STEP, STEPS = 4, 8, 3
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recovered": ("adaptive.memory_limit=[120MiB,14MiB]",),
    "budget": ("adaptive.token_budget=150",),
}


def padded_rows(name: str) -> int:
    """Return the rows of the batches in which images are padded."""
    return ROWS_PER_STEP if name == "budget" else ROWS


def config_of(kind: str, folder: Path, *overrides: str) -> DictConfig:
    use_next_port()
    [stock] = [stock for stock in stock_configs.stock_configs() if stock.name == f"llama3_2_vision/11B_{kind}"]
    words = (
        *(f"checkpointer.checkpoint_dir={folder.parent / 'weights'}", f"metric_logger.path={folder / 'log.jsonl'}"),
        *("metric_logger._component_=tests.recipes.recorders.JsonLogger", "tokenizer.max_seq_len=128"),
        *("seed=0", "dtype=fp32", "clip_grad_norm=0.7", f"batch_size={ROWS}", "gradient_accumulation_steps=2"),
    )
    cfg = OmegaConf.merge(on_cpu(stock.load(), folder), OmegaConf.from_dotlist([*words, *SGD, *overrides]))
    assert isinstance(cfg, DictConfig)
    del cfg.metric_logger["log_dir"]
    return cfg


def run_all(kind: str, most_images: int, folder: Path) -> None:
    with (
        mock.patch.object(RandomTiles, "dtype", torch.float32),
        mock.patch.object(stock_configs, "MOST_IMAGES", most_images),
    ):
        for name, overrides in RUNS.items():
            cfg = config_of(kind, folder / name, *overrides)
            with offline(cfg, 2, STEPS):
                run_ours(kind, cfg)
        # torchtune's masks of several images are wrong
        collate = "collate_fn=torchtune_adaptive.data.loading.collate_images"
        for rows in sorted({padded_rows(name) for name in RUNS}):
            sizes = f"batch_size={rows}", f"gradient_accumulation_steps={ROWS_PER_STEP // rows}"
            cfg = config_of(kind, folder / f"stock {rows}", *sizes, *([collate] if most_images > 1 else []))
            with offline(cfg, 2, STEPS):
                run_stock(kind, cfg)


@pytest.fixture(scope="module", params=[("full", 1), ("lora", 2)], ids=["full-one-image", "lora-two-images"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, most_images = request.param
    folder = tmp_path_factory.mktemp(kind)
    cfg = config_of(kind, folder / "weights")
    import_model(cfg)
    write_checkpoint(cfg)
    run_on_ranks(2, run_all, kind, most_images, folder, timeout_s=100, in_group=False)
    return folder


@pytest.mark.smoke("full-one-image-recovered")
@pytest.mark.parametrize("name", RUNS)
def test_every_step_has_the_figures_of_the_stock_recipe(runs: Path, name: str) -> None:
    stock, ours = (read_log(runs / each / "log.jsonl") for each in (f"stock {padded_rows(name)}", name))
    assert len(ours) == len(stock) == STEPS
    assert_same_figures(ours, stock, ("step", "loss", "grad_norm", "lr"), rel=RELATIVE)


def test_steps_are_repeated_in_smaller_microbatches_without_a_search(runs: Path) -> None:
    last = read_log(runs / "recovered" / "log.jsonl")[-1]
    assert last["oom_recoveries"] > 0
    assert last["microbatch_rows"] < ROWS
