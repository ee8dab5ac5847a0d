"""Runs a recipe, ours or the installed stock one, inside a rank of a test."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchtune
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.host.configs import locate

STOCK = Path(torchtune.__file__).parent.parent / "recipes"
OURS = {
    "full": ("adaptive_full_finetune_distributed", "AdaptiveFullFinetuneDistributed"),
    "lora": ("adaptive_lora_finetune_distributed", "AdaptiveLoraFinetuneDistributed"),
}
STOCK_CLASSES = {"full": "FullFinetuneRecipeDistributed", "lora": "LoRAFinetuneRecipeDistributed"}


def demo_config(kind: str, folder: Path, *overrides: str) -> DictConfig:
    """The demo's config of this kind, with its output and weights in `folder`, logging to `log.jsonl`."""
    cfg = OmegaConf.load(locate(f"adaptive/demo/{kind}"))
    ours = [
        f"output_dir={folder / 'out'}",
        f"checkpointer.checkpoint_dir={folder.parent / 'weights'}",
        "metric_logger._component_=tests.recipes.recording.JsonLogger",
        f"metric_logger.path={folder / 'log.jsonl'}",
        "dataset.samples=64",
        "epochs=1",
    ]
    merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*ours, *overrides]))
    assert isinstance(merged, DictConfig)
    del merged.metric_logger["log_dir"]
    return merged


def load_ours(kind: str) -> Any:
    module, name = OURS[kind]
    return getattr(import_module(module), name)


def load_stock(kind: str) -> Any:
    """The class of the installed stock recipe."""
    return runpy.run_path(str(STOCK / f"{kind}_finetune_distributed.py"))[STOCK_CLASSES[kind]]


def run_ours(kind: str, cfg: DictConfig) -> Any:
    """Collective: the whole life of our recipe; returns it."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    return recipe


def run_stock(kind: str, cfg: DictConfig) -> None:
    """Collective: the whole life of the stock recipe, with the names replaced that fail on a CPU."""
    with stock_on_cpu():
        if kind == "lora":
            dist.init_process_group("gloo")
        recipe = load_stock(kind)(cfg)
        recipe.setup(cfg)
        recipe.train()
        recipe.cleanup()


@contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Without the memory statistics that exist on accelerators only."""
    nothing: dict[str, float] = {}
    with (
        mock.patch("torchtune.training.get_memory_stats", return_value=nothing),
        mock.patch("torchtune.training.log_memory_stats"),
        mock.patch("torchtune.training.cleanup_before_training"),
    ):
        yield


def saved_weights(folder: Path, epoch: int = 0) -> dict[str, torch.Tensor]:
    """What a finished run has saved."""
    loaded: dict[str, torch.Tensor] = torch.load(
        folder / "out" / f"epoch_{epoch}" / "model-00001-of-00001.bin", weights_only=True
    )
    return loaded


def tune_run(recipe: str, arguments: Sequence[str], nproc: int | None) -> list[str]:
    """The command line of `tune run`, with this interpreter's torchtune."""
    launcher = [] if nproc is None else ["--nproc_per_node", str(nproc)]
    return [str(Path(sys.executable).parent / "tune"), "run", *launcher, recipe, *arguments]
