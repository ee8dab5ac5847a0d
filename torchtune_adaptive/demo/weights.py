"""The weight files of the demo models, which are generated on first use and then read like any checkpoint."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtune.training import FullModelTorchTuneCheckpointer

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.demo.model import demo_classifier, demo_model, lowercase_share_weights

WEIGHTS_FILE, VALUE_FILE, REWARD_FILE = "demo.pt", "demo_value.pt", "demo_reward.pt"


def demo_checkpointer(
    checkpoint_dir: str,
    output_dir: str,
    model_type: str = "LLAMA3",
    checkpoint_files: Sequence[str] = (WEIGHTS_FILE,),
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    **others: Any,
) -> FullModelTorchTuneCheckpointer:
    """Generate missing files of the demo, and return torchtune's checkpointer. Ranks may call this concurrently.

    `sizes` must equal the arguments that the config passes to `demo_model`.
    """
    generators: dict[str, Callable[[], Mapping[str, object]]] = {
        WEIGHTS_FILE: lambda: demo_model(**(sizes or {})).state_dict(),
        VALUE_FILE: lambda: demo_classifier().state_dict(),
        REWARD_FILE: lowercase_share_weights,
    }
    for name in generators.keys() & set(checkpoint_files):
        generate_if_missing(Path(checkpoint_dir) / name, generators[name], seed=seed)
    return FullModelTorchTuneCheckpointer(
        checkpoint_dir=checkpoint_dir,
        checkpoint_files=list(checkpoint_files),
        model_type=model_type,
        output_dir=output_dir,
        **others,
    )


def generate_if_missing(path: Path, generate: Callable[[], Mapping[str, object]], *, seed: int = 0) -> None:
    """Save generated weights at `path` unless the file exists."""
    if path.is_file():
        return
    buffer = io.BytesIO()  # given a file, torch.save would write its name into it
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.save(generate(), buffer)
    replace_file(path, buffer.getvalue())
