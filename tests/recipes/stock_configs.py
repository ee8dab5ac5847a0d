"""Adapt every config that torchtune ships for these recipes to CPUs without network or weights.

Replace only: the device, file paths, sizes of models and images, vocabularies of tokenizers, rows of datasets, CPU
offloading and the code generation of the compiler. All other keys keep their values, and the rest of torchtune runs
unchanged: builders, transforms, packing, checkpointers.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes
from torchtune.data import Message

from tests.ranks import run_on_ranks
from tests.recipes.running import STOCK_CLASSES, run_ours
from tests.recipes.shrunk_models import IMAGE_SIZE, MAX_TILES, shrunk_models, write_checkpoint
from torchtune_adaptive.demo.dataset import demo_row
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE, DemoTokenizer

RECIPES = {recipe: kind for kind, (recipe, _) in STOCK_CLASSES.items()}
"""torchtune's recipes and our kinds."""
BYTES_PER_TOKEN = 4
# more rows than fit into a pack
ROWS_PER_PACK = 24
MOST_IMAGES = 2
"""Images of every second row; other rows have one."""
VISION = "torchtune.models.llama3_2_vision._transform"
TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


@dataclass(frozen=True)
class StockConfig:
    recipe: str
    name: str
    path: Path

    @property
    def is_lora(self) -> bool:
        return self.recipe.startswith("lora")

    def load(self) -> DictConfig:
        return OmegaConf.load(self.path)


def stock_configs() -> list[StockConfig]:
    folder = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
    return [
        StockConfig(recipe.name, listed.name, folder / listed.file_path)
        for recipe in get_all_recipes()
        if recipe.name in RECIPES
        for listed in recipe.configs
    ]


def train(stock: StockConfig, folder: Path, world_size: int) -> DictConfig:
    """Run our recipe with this config; return the config as it ran."""
    cfg = on_cpu(stock.load(), folder)
    import_model(cfg)
    write_checkpoint(cfg)
    run_on_ranks(world_size, _train, stock, folder, timeout_s=200, in_group=False)
    return cfg


def _train(stock: StockConfig, folder: Path) -> None:
    os.environ["TORCH_COMPILE_BACKEND"] = "eager"
    # torchtune collects after each of up to 191 checkpoint files, and would scan all of torch each time
    gc.freeze()
    cfg = on_cpu(stock.load(), folder)
    with offline(cfg, int(os.environ["WORLD_SIZE"])):
        run_ours(RECIPES[stock.recipe], cfg)


def on_cpu(cfg: DictConfig, directory: Path) -> DictConfig:
    """Return the config with the keys changed that need a GPU, network or weights."""
    changed = cfg.copy()
    changed.device = "cpu"
    changed.output_dir = str(directory / "out")
    changed.checkpointer.checkpoint_dir = str(directory / "weights")
    if "ref_checkpointer" in cfg:
        changed.ref_checkpointer.checkpoint_dir = changed.checkpointer.checkpoint_dir
    if cfg.get("fsdp_cpu_offload"):
        # FSDP pins offloaded memory, which needs an accelerator
        changed.fsdp_cpu_offload = False
    if "image_size" in cfg.tokenizer:
        changed.tokenizer.image_size = changed.model.image_size = IMAGE_SIZE
    else:
        changed.tokenizer._component_ = f"{__name__}.small_tokenizer"
    return changed


def import_model(cfg: DictConfig) -> None:
    """Import the models of a config. torchtune's vision models import torchvision, only for images."""
    package = cfg.model._component_.rpartition(".")[0]
    missing = importlib.util.find_spec("torchvision") is None
    stand_ins = {name: mock.MagicMock() for name in TORCHVISION} if missing else {}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module(package)
    finally:
        for name in stand_ins:
            del sys.modules[name]


def steps_of(cfg: DictConfig) -> int:
    """Return two if a warmup starts with a learning rate of 0, otherwise one."""
    return 2 if "lr_scheduler" in cfg else 1


@contextlib.contextmanager
def offline(cfg: DictConfig, world_size: int, steps: int | None = None) -> Iterator[None]:
    """While open, models are small, and rows, image tiles and the vision tokenizer are generated."""
    import_model(cfg)
    rows = cfg.batch_size * cfg.gradient_accumulation_steps * world_size * (steps or steps_of(cfg))
    if cfg.dataset.get("packed"):
        rows *= ROWS_PER_PACK
    with contextlib.ExitStack() as patches:
        patches.enter_context(shrunk_models())
        load = partial(_load_rows, rows)
        replacements = {f"torchtune.datasets.{each}.load_dataset": load for each in ("_sft", "_preference")}
        if "image_size" in cfg.tokenizer:
            replacements[f"{VISION}.llama3_tokenizer"] = small_tokenizer
            replacements[f"{VISION}.CLIPImageTransform"] = RandomTiles
        for name, replacement in replacements.items():
            patches.enter_context(mock.patch(name, replacement))
        yield


def _load_rows(count: int, source: str, **_: Any) -> list[dict[str, Any]]:
    return [_row(source, index) for index in range(count)]


def _row(source: str, index: int) -> dict[str, Any]:
    """Return a row with the columns of the dataset at `source`."""
    row = demo_row(0, index)
    if "alpaca" in source:
        return {"instruction": row["input"], "input": "", "output": row["output"]}
    if "stack-exchange" in source:
        return {"question": row["input"], "response_j": row["output"], "response_k": row["output"][::-1]}
    images = [index, index // 2][: 1 + index % MOST_IMAGES]
    return {"images": images, "texts": [{"user": row["input"], "assistant": row["output"]}]}


class RandomTiles:
    """Replaces CLIPImageTransform: an image is a number and yields one to four tiles of noise."""

    dtype = torch.bfloat16

    def __init__(self, *, tile_size: int, max_num_tiles: int, **_: Any) -> None:
        assert (tile_size, max_num_tiles) == (IMAGE_SIZE, MAX_TILES)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        tiles = sample["image"] % MAX_TILES + 1
        noise = torch.rand(tiles, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(sample["image"]))
        return {"image": noise.to(self.dtype), "aspect_ratio": torch.tensor([1, tiles])}


class SmallTokenizer(DemoTokenizer):
    """Yields about the token counts of a real tokenizer, plus one token for images, which vision models embed
    separately.
    """

    image_id = VOCAB_SIZE

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return super().encode(text[::BYTES_PER_TOKEN], add_bos, add_eos)

    def tokenize_messages(self, messages: list[Message], **kwargs: Any) -> tuple[list[int], list[bool]]:
        images = sum(len(message.get_media()) for message in messages)
        text = [Message(message.role, message.text_content, masked=message.masked) for message in messages]
        (bos, *tokens), (masked, *mask) = super().tokenize_messages(text, **kwargs)
        return [bos, *[self.image_id] * images, *tokens], [masked, *[True] * images, *mask]


def small_tokenizer(*_: Any, max_seq_len: int | None = None, **__: Any) -> SmallTokenizer:
    """Accept the arguments of any torchtune tokenizer; read no file."""
    return SmallTokenizer(max_seq_len=max_seq_len)
