"""Find the checkpoint of a Trainer to resume from, by its files and their sizes. Tensors are not read."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.errors import ConfigError

logger = logging.getLogger(__name__)

SINGLE = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
WEIGHTS = (*SINGLE, *(f"{name}.index.json" for name in SINGLE[::2]), *(f"*/{name}" for name in SINGLE[1::2]))
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp*", ("optimizer.bin", "optimizer_[0-9]*")


def newest_complete(args: Any) -> str:
    """Collective: return the newest checkpoint in which all ranks find all files, none of them cut."""
    folder, first = Path(args.output_dir), ""
    names = from_all_ranks({path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")})
    for step in sorted({int(name) for name in set().union(*names) if name.isdecimal()}, reverse=True):
        path = folder / f"checkpoint-{step}"
        damages = [damage for damage in from_all_ranks(damage_of(path, args)) if damage]
        if not damages:
            return str(path)
        first = first or f" ({path.name}: {damages[0]})"
        if rank() == 0:
            logger.warning("%s is skipped: %s", path, damages[0])
    raise ConfigError(
        f"{folder} contains no complete checkpoint to resume from{first}: start from the beginning, or pass the path "
        "of a checkpoint to train(), which does not check it"
    )


def damage_of(folder: Path, args: Any) -> str | None:
    """Return the name of a file that is missing or cut, with the reason."""

    def find(*patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in sorted(folder.glob(pattern))]

    try:
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return f"its save was interrupted ({TRAINER_STATE_NAME} is missing or cut)"
    weights = [FSDP_WEIGHTS] if find(*FSDP_OPTIMIZER) else [*WEIGHTS, FSDP_WEIGHTS]
    parts = [weights, ["optimizer.pt", *FSDP_OPTIMIZER], ["scheduler.pt"], ["rng_state.pth", "rng_state_*.pth"]]
    for part in parts[:1] if args.save_only_model else parts:
        if not find(*part):
            return f"it has no {' or '.join(part[:2])}"  # the most frequent names
    ranks = {int(path.stem[10:]) for path in find("rng_state_*.pth") if path.stem[10:].isdecimal()}
    missing = set(range(max(2, max(ranks, default=0) + 1))) - ranks  # one process writes rng_state.pth
    if ranks and missing and not find("rng_state.pth") and not args.save_on_each_node:
        return f"it has no rng_state_{min(missing)}.pth"
    for path in find(*WEIGHTS, "scaler.pt", *(pattern for part in parts for pattern in part)):
        if path.is_dir() and args.save_on_each_node:  # it may contain only the files of this node
            continue
        try:
            check(path)
        except Exception as error:  # noqa: BLE001 - reading a damaged file can fail in any way
            return f"{path.relative_to(folder)} is missing or cut ({error})"
    return None


def check(path: Path) -> None:
    """Raise an exception if a file is missing or cut, or a file named in an index or in a folder's metadata."""
    if path.is_dir():
        for stored in pickle.loads((path / ".metadata").read_bytes()).storage_data.values():
            if (path / stored.relative_path).stat().st_size < stored.offset + stored.length:
                raise ValueError(f"{stored.relative_path} is cut")
    elif path.suffix == ".json":
        for name in set(json.loads(path.read_text())["weight_map"].values()):
            check(path.with_name(name))
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.name} does not have the size that its header states")
    elif not is_zipfile(path):
        with path.open("rb") as file:
            if file.read(1) != b"\x80":  # torch's former format, a pickle
                raise ValueError("it has no end record")
