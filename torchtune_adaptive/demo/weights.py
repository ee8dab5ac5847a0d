"""The demo model's first weights: made from a seed on first use, then read like any checkpoint."""

import io
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtune.training import FullModelTorchTuneCheckpointer

from torchtune_adaptive.demo.model import demo_model

WEIGHTS_FILE = "demo.pt"


def demo_checkpointer(
    checkpoint_dir: str,
    output_dir: str,
    model_type: str = "LLAMA3",
    checkpoint_files: Sequence[str] = (WEIGHTS_FILE,),
    adapter_checkpoint: str | None = None,
    recipe_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
    seed: int = 0,
    sizes: Mapping[str, Any] | None = None,
) -> FullModelTorchTuneCheckpointer:
    """Component for a config's `checkpointer:`: torchtune's own, after seeing to it that its weights exist.

    `sizes` are those that the config gives to `demo_model`, if any. Every rank may call this at once.
    """
    ensure_weights(Path(checkpoint_dir) / WEIGHTS_FILE, seed=seed, sizes=sizes)
    return FullModelTorchTuneCheckpointer(
        checkpoint_dir=checkpoint_dir,
        checkpoint_files=list(checkpoint_files),
        model_type=model_type,
        output_dir=output_dir,
        adapter_checkpoint=adapter_checkpoint,
        recipe_checkpoint=recipe_checkpoint,
        should_load_recipe_state=should_load_recipe_state,
    )


def ensure_weights(path: Path, *, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> None:
    """Leaves the weights of this seed and these sizes at `path`; does not touch a file that holds them.

    No lock: every process makes the same bytes under a name of its own and renames them into place, so it
    does not matter which one is last, and one that dies leaves nothing that others wait for.
    """
    content = _weights(seed, sizes or {})
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # torchtune copies a checkpoint's directory, except for names that start with a dot
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _weights(seed: int, sizes: Mapping[str, Any]) -> bytes:
    # a buffer, because torch.save writes a file's own name into it
    buffer = io.BytesIO()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.save(demo_model(**sizes).state_dict(), buffer)
    return buffer.getvalue()
