"""The random generators of every rank, so that a resumed run draws what the undisturbed one would have drawn."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtune_adaptive.checkpoints.sources import RANDOM_FILE
from torchtune_adaptive.engine.memory import RngState
from torchtune_adaptive.text import count_of

RandomState = dict[str, Any]


def capture_random_state() -> RandomState:
    """What this rank would draw next."""
    torch_state = RngState.capture()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch_state.cpu,
        "cuda": torch_state.cuda,
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, [int(key) for key in keys], *rest]),
    }


def write_random_state(folder: Path, states: list[RandomState]) -> None:
    torch.save(states, folder / RANDOM_FILE)


def restore_random_state(folder: Path) -> str | None:
    """Puts this rank's generators back. Returns why that cannot be, where it cannot."""
    path = folder / RANDOM_FILE
    if not path.is_file():
        return "the checkpoint has no random state"
    states = torch.load(path, weights_only=True)
    if len(states) != dist.get_world_size():
        return f"the checkpoint has the random state of {count_of(len(states), 'rank')}"
    _restore(states[dist.get_rank()])
    return None


def _restore(state: RandomState) -> None:
    RngState(cpu=state["torch"], cuda=state["cuda"] if torch.cuda.is_initialized() else None).restore()
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
