"""Divide a GPU's memory into categories: at one moment, and over a step, from the history of torch's allocator."""

from __future__ import annotations

import gc
import linecache
import os
import pickle
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.rehearse.result import GIB
from torchtune_adaptive.rehearse.start import RankSettings

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "activations and other"
COMMUNICATION, BACKWARD = "communication", "backward pass"
# in Okabe and Ito's palette, which people with color blindness can distinguish
COLORS = {PARAMETERS: "#0072B2", OPTIMIZER: "#56B4E9", GRADIENTS: "#009E73", COMMUNICATION: "#CC79A7",
          OTHER: "#E69F00", BACKWARD: "#F0E442"}  # fmt: skip
UPDATE = ", update"
_LIBRARY = str(Path(torch.__file__).parent), str(Path(__file__).parent), "<"


class MemoryHistory:
    """Records every allocation with its stack, for torch's memory_viz and for a picture of one step.

    Events of the script's thread have a label: "step 2", or "step 2, update" inside an optimizer.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._file, self._several = settings.snapshot, settings.together is not None
        self._owners = defaultdict[str, dict[int, str]](dict)
        """Owners of storages at the start of each update, by label and address."""
        if self._file:
            torch.cuda._lazy_call(self._start)

    def _start(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python")
        torch.cuda.memory._set_memory_metadata("step 1")

    def begin(self, step: int, phase: str = "") -> None:
        """Label the allocations of the script's thread."""
        if self._file and torch.cuda.is_initialized():
            if phase:
                self._owners[f"step {step}{phase}"] |= _owners()
            torch.cuda.memory._set_memory_metadata(f"step {step}{phase}")

    def save(self, device: int) -> None:
        """Write the snapshot and its picture. The files of one of several ranks have the rank in their names."""
        if self._file and torch.cuda.is_initialized():
            file, rank = Path(self._file), os.environ.get("RANK")
            file = file.with_stem(f"{file.stem}_{rank}") if self._several and rank is not None else file
            snapshot = torch.cuda.memory._snapshot()
            events = [event for event in snapshot["device_traces"][device] if event["action"] != "snapshot"]
            snapshot["timeline"] = _timeline(events, self._owners, _owners()) if events else None
            replace_file(file, pickle.dumps(snapshot))
            if events and find_spec("matplotlib"):
                usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
                _draw(snapshot["timeline"], usable / GIB, f"{file}.png")


def _timeline(
    events: Sequence[Mapping[str, Any]], owners: Mapping[str, Mapping[int, str]], last_owners: Mapping[int, str]
) -> dict[str, Any]:
    """Return the allocated bytes of each category after each event of a step.

    Storages with an owner have its category, even before they get it. The stack shows the category of all others.
    """
    sizes, categories = np.zeros(len(events), np.int64), np.full(len(events), OTHER, object)
    alive: dict[int, int] = {}
    """The event that allocated the block at an address."""
    steps, phases, label = [], [], ""

    def claim(owned: Mapping[int, str]) -> None:
        for address in owned.keys() & alive.keys():
            categories[alive[address]] = owned[address]

    for at, event in enumerate(events):
        own = event["user_metadata"]
        if own and own != label:  # an update may begin, or be over without allocations
            claim(owners.get(f"{label.removesuffix(UPDATE)}{UPDATE}", {}))
            label = own
        steps.append(label.removesuffix(UPDATE))
        phases.append("update" if own.endswith(UPDATE) else "forward" if own and event["frames"] else "backward")
        if event["action"] == "alloc":
            alive[event["addr"]] = at
            sizes[at], categories[at] = event["size"], _category(event)
        elif event["action"] == "free_requested" and event["addr"] in alive:
            allocated = alive.pop(event["addr"])
            sizes[at], categories[at] = -sizes[allocated], categories[allocated]
    claim(last_owners)
    failed = events[-1]["action"] == "oom"
    peak = len(events) - 1 if failed else int(sizes.cumsum().argmax())
    step = slice(steps.index(steps[peak]), len(steps) - steps[::-1].index(steps[peak]))
    return {
        "step": steps[peak],
        "phases": phases[step],
        "held_bytes": {each: np.where(categories == each, sizes, 0).cumsum()[step].tolist() for each in COLORS},
        "peak": peak - step.start,
        "requested_bytes": events[-1]["size"] if failed else 0,
        "place": next(filter(None, map(_place, events[peak::-1])), ""),
    }


def _category(event: Mapping[str, Any]) -> str:
    if event["user_metadata"].endswith(UPDATE):
        return OPTIMIZER
    files = [frame["filename"] for frame in event["frames"]]
    inner = takewhile(lambda file: file.startswith(_LIBRARY) and "/nn/modules/" not in file, files)
    if any("/distributed" in file and "/distributed/tensor/" not in file for file in inner):
        return COMMUNICATION
    return OTHER if files else BACKWARD  # autograd's threads run C++


def _place(event: Mapping[str, Any]) -> str:
    """Return the innermost line outside torch; empty if there is none."""
    outside = ((frame["filename"], frame["line"]) for frame in event["frames"])
    file, line = next((each for each in outside if not each[0].startswith(_LIBRARY)), ("", 0))
    shown = file.rpartition("/site-packages/")[2]
    return f"{shown}:{line}: {linecache.getline(file, line).strip()}" if file else ""


def _draw(timeline: Mapping[str, Any], usable: float, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.subplots()
    phases, peak, requested = timeline["phases"], timeline["peak"], timeline["requested_bytes"] / GIB
    held = {f"{sizes[peak] / GIB:.1f} {name}": np.array(sizes) / GIB for name, sizes in timeline["held_bytes"].items()}
    axes.stackplot(range(len(phases)), *held.values(), labels=held, colors=COLORS.values(), step="post", lw=0)
    axes.axhline(usable, color="#333333", lw=1.2, ls="--", label=f"{usable:.1f} usable")
    top = sum(sizes[peak] for sizes in held.values())
    what = f"{requested:.1f} more requested" if requested else f"{top:.1f} allocated"
    axes.plot([peak] * 2, [top, top + requested], "v-", markevery=[0], label=what, color="#D55E00", lw=4, clip_on=False)
    starts = {phase: phases.index(phase) for phase in phases}
    axes.set_xticks([*starts.values()], ["\n" * (at % 2) + phase for at, phase in enumerate(starts)], ha="left")
    heading = f"out of memory with {top:.1f} GiB allocated" if requested else "the highest peak"
    place = textwrap.fill(textwrap.shorten(timeline["place"], 170), 60)
    figure.suptitle(f"{timeline['step']}: {heading}, at\n{place}", x=0.02, ha="left", fontsize=11)
    axes.set(ylabel="allocated, GiB", ylim=(0, min(1.1 * usable, 2 * top) + requested))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, title="GiB at this moment", alignment="left")
    figure.savefig(path, dpi=200)


def memory_by_holder(device: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer states and other tensors that are allocated on a device."""
    owners = _owners()
    held: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                held[owners.get(block["address"], OTHER)] += block["size"]
    return dict(held.most_common())


def _owners() -> dict[int, str]:
    """Return the purpose of each storage by address: of parameters, buffers, gradients and optimizer states."""
    owners: dict[int, str] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance reads __class__, which would import lazy modules
        if issubclass(kind, torch.Tensor) and isinstance(thing, torch.nn.Parameter):
            owners[_address(thing)] = PARAMETERS
            if thing.grad is not None:
                owners[_address(thing.grad)] = GRADIENTS
        elif issubclass(kind, torch.nn.Module):
            owners |= {_address(each): PARAMETERS for each in thing._buffers.values() if each is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            state = tree_leaves(dict(thing.state))
            owners |= {_address(each): OPTIMIZER for each in state if isinstance(each, torch.Tensor)}
    return owners


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it is not on a GPU."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage()
        return int(storage.data_ptr()) if storage.device.type == "cuda" else 0
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return 0
