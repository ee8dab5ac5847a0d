"""Adapt every config that torchtune ships for these recipes to CPUs without network or weights.

Replace only: the device, file paths, sizes of models and images, vocabularies of tokenizers, rows of datasets, CPU
offloading and the code generation of the compiler. All other keys keep their values, and the rest of torchtune runs
unchanged: builders, transforms, packing, checkpointers.
"""

import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torchtune import config, training
from torchtune._recipe_registry import get_all_recipes
from torchtune.data import Message
from torchtune.modules.peft import get_adapter_params

from tests.ranks import run_on_ranks
from tests.recipes.running import STOCK_CLASSES, run_ours
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


IMAGE_SIZE = 28
MAX_TILES = 4

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "head_dim": 32,
    "intermediate_dim": 128,
    # vision
    "fusion_interval": 2,
    "decoder_embed_dim": 64,
    "clip_embed_dim": 64,
    "clip_num_layers": 2,
    "clip_hidden_states": [0, 1],
    "num_layers_projection": 1,
    "tile_size": IMAGE_SIZE,
}
# NF4 keeps one scale per 64 × scaler_block_size weights, and each of two ranks needs a whole number of them
QUANTIZED = {
    "embed_dim": 256,
    "head_dim": 64,
    "intermediate_dim": 256,
    "decoder_embed_dim": 256,
    "clip_embed_dim": 256,
    "scaler_block_size": 256,
}

Arguments = dict[str, Any]


@contextlib.contextmanager
def shrunk_models() -> Iterator[list[Arguments]]:
    """While open, every model that torchtune builds is small; collect the arguments of each build."""
    builds: list[Arguments] = []
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtune.models.") and name.endswith("._model_builders"):
                for attribute, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value.__module__.endswith("._component_builders"):
                        patches.enter_context(mock.patch.object(module, attribute, _shrunk(value, builds)))
        yield builds


def _shrunk(builder: Callable[..., Any], builds: list[Arguments]) -> Callable[..., Any]:
    def build(**given: Any) -> Any:
        builds.append(given | _smaller(given))
        return builder(**builds[-1])

    return build


def _smaller(given: Arguments) -> Arguments:
    sizes = SMALL | QUANTIZED if given.get("quantize_base") else SMALL
    smaller = {key: sizes[key] for key in given if key in sizes and given[key] is not None}
    if "num_kv_heads" in given:
        smaller["num_kv_heads"] = _kv_heads(given["num_heads"], given["num_kv_heads"])
    return smaller


def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """Keep the kind of attention: one shared head, one head per query head, or groups."""
    if num_kv_heads in (None, num_heads):
        return SMALL["num_heads"]
    return 1 if num_kv_heads == 1 else SMALL["num_heads"] // 2


def write_checkpoint(cfg: DictConfig) -> None:
    """Write random weights for `cfg.model`, in the format and the files that `cfg.checkpointer` names."""
    directory = Path(cfg.checkpointer.checkpoint_dir)
    directory.mkdir(parents=True)
    dtype = training.get_dtype(cfg.dtype, device=torch.device("cpu"))
    with shrunk_models() as builds, training.set_default_dtype(dtype):
        model = config.instantiate(cfg.model)
    adapter = get_adapter_params(model)
    weights = {key: opened(weight) for key, weight in model.state_dict().items() if key not in adapter}
    (directory / "config.json").write_text(json.dumps(_huggingface_config(builds or [cfg.model])))
    names = file_names(cfg)
    for name in names:
        path = directory / name
        save_file({}, path) if path.suffix == ".safetensors" else torch.save({}, path)
    _save_in_format(cfg, weights, names)


def opened(weight: torch.Tensor) -> torch.Tensor:
    """Open the gates of new vision models: gates of 0 block gradients, and trained models have open gates."""
    return weight if weight.any() else torch.full_like(weight, 0.1)


def file_names(cfg: DictConfig) -> list[str]:
    files = cfg.checkpointer.checkpoint_files
    if isinstance(files, DictConfig):
        files = training.FormattedCheckpointFiles.from_dict(files).build_checkpoint_filenames()
    return sorted(files)


def _save_in_format(cfg: DictConfig, weights: dict[str, torch.Tensor], names: list[str]) -> None:
    """Let torchtune's checkpointer convert and write; then move the files to where it will read them."""
    directory = Path(cfg.checkpointer.checkpoint_dir)
    drafts = directory.with_name("drafts")
    section = {**cfg.checkpointer, "output_dir": str(drafts)}
    if section["_component_"].endswith("HFCheckpointer"):
        section["safe_serialization"] = names[0].endswith(".safetensors")
    checkpointer = config.instantiate(DictConfig(section))
    # torchtune takes this map from the checkpoint it has read
    checkpointer._weight_map = _RoundRobin(len(names))
    checkpointer.save_checkpoint({training.MODEL_KEY: weights}, epoch=0)
    for draft, name in zip(sorted(drafts.glob("epoch_0/model-*-of-*")), names, strict=False):
        draft.rename(directory / name)


class _RoundRobin(dict[str, str]):
    """Assigns keys to numbered files in turn."""

    def __init__(self, files: int) -> None:
        self._files = files

    def __missing__(self, key: str) -> str:
        self[key] = f"{len(self) % self._files + 1:04}"
        return self[key]


def _huggingface_config(builds: list[Arguments]) -> dict[str, Any]:
    """Return the sizes that torchtune needs for conversion to and from Hugging Face's format."""
    decoder = next(build for build in builds if "vocab_size" in build)
    text = {
        "num_attention_heads": decoder["num_heads"],
        "num_key_value_heads": decoder["num_kv_heads"],
        "hidden_size": decoder["embed_dim"],
        "vocab_size": decoder["vocab_size"],
        "tie_word_embeddings": decoder.get("tie_word_embeddings", False),
    }
    if "head_dim" in decoder:
        text["head_dim"] = decoder["head_dim"]
    encoder = next((build for build in builds if "clip_embed_dim" in build), None)
    return text if encoder is None else _vision_config(text, encoder, decoder)


def _vision_config(text: dict[str, Any], encoder: Arguments, decoder: Arguments) -> dict[str, Any]:
    fusions = decoder["num_layers"] // decoder["fusion_interval"]
    # Hugging Face counts a fusion layer as a separate layer, before the layer that torchtune joins it to
    cross = [index * (decoder["fusion_interval"] + 1) + decoder["fusion_interval"] - 1 for index in range(fusions)]
    ratios = [(h, w) for h in range(1, MAX_TILES + 1) for w in range(1, MAX_TILES + 1) if h * w <= MAX_TILES]
    return {
        "text_config": {**text, "cross_attention_layers": cross},
        "vision_config": {
            "hidden_size": encoder["clip_embed_dim"],
            "image_size": encoder["tile_size"],
            "max_num_tiles": encoder["max_num_tiles"],
            "supported_aspect_ratios": ratios,
        },
    }
