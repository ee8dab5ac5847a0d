"""Starts of a run in folders with prepared checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tests.unit.checkpoints.checkpoint_files import save
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.resuming import Start, decide
from torchtune_adaptive.checkpoints.store import Files, Position
from torchtune_adaptive.config.checks import read_full_settings

ADAPTER = {"adapter_model.pt": b"adapter", "recipe_state.pt": b"state"}


def config(directory: Path, *overrides: str) -> DictConfig:
    base = {
        "output_dir": str(directory),
        "device": "cpu",
        "dtype": "fp32",
        "seed": 0,
        "shuffle": True,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "epochs": 3,
        "model": {"_component_": "m"},
        "dataset": {"_component_": "d", "source": "a"},
        "optimizer": {"_component_": "o", "lr": 1e-3},
        "checkpointer": {"output_dir": "${output_dir}", "checkpoint_files": ["base.pt"]},
        "resume_from_checkpoint": "auto",
    }
    merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


def start(directory: Path, *overrides: str, recipe: str = "full", steps: Callable[[int], int] | None = None) -> Start:
    cfg = config(directory, *overrides)
    return decide(read_full_settings(cfg), recipe, steps)


def saved(directory: Path, name: str, serial: int = 0, *, recipe: str = "full", epochs: int = 1, **others: Any) -> Path:
    position = Position(epochs=epochs, steps_in_epoch=0, step=4 * epochs)
    identity = identity_of(config(directory), recipe)
    return save(directory, name, serial, identity=identity, position=position, **others)


def files_of(found: Start) -> Files:
    assert found.files is not None
    return found.files
