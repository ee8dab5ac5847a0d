"""torchtune's model builders with small sizes, and checkpoints of the models they build.

A config's builder, for example `llama3_1.lora_llama3_1_8b`, runs as it is, with the config's own arguments. Only
the component builder that it calls gets smaller numbers.
"""

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torchtune import config, training
from torchtune.modules.peft import get_adapter_params

from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE

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
