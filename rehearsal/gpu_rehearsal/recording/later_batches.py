"""After the rehearsed steps, look whether a later batch of the script's data is larger. No batch is computed."""

from __future__ import annotations

import math
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

MOST_BATCHES, MOST_ELEMENTS, MOST_S = 200, 2**25, 60
"""Limits of the look at an iterator: batches, and elements of their tensors; and of the whole look: seconds."""
LEAST_GROWTH = 1.25
"""From the first epoch to the last, to be reported. Samples of random lengths make a smaller difference."""
_take = _BaseDataLoaderIter.__next__
_sizes = defaultdict[int, list[int]](list)
"""By dataset: the number of elements of each batch."""
_epochs = defaultdict[Any, list[int]](list)
"""By the lines that take batches: the elements of the largest batch of each iterator."""
_iterators = WeakSet[_BaseDataLoaderIter]()


def note_batches() -> None:
    """Note the size of each batch that the script takes from a DataLoader."""

    def take(iterator: _BaseDataLoaderIter) -> Any:
        batch = _take(iterator)
        with suppress(Exception):
            _sizes[id(iterator._dataset)].append(elements := elements_of(batch))
            if iterator not in _iterators:
                _iterators.add(iterator)
                lines = ((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
                vars(iterator)["epochs"] = _epochs[tuple(lines)]
                vars(iterator)["epochs"].append(0)
            vars(iterator)["epochs"][-1] = max(elements, vars(iterator)["epochs"][-1])
        return batch

    _BaseDataLoaderIter.__next__ = take  # type: ignore[method-assign,assignment]


def larger_batch(steps: int) -> dict[str, int]:
    """Take further batches after these steps. Return facts about the one that grows most. If none grows, return the
    largest batches of the first and the last epoch, if they grow from each to the next."""
    found: list[dict[str, int]] = []

    def look() -> None:
        for iterator in [*_iterators]:
            sizes = _sizes[id(iterator._dataset)]
            taken, most = len(sizes), max(sizes)
            with suppress(Exception):  # the data may fail
                while most and len(sizes) < taken + MOST_BATCHES and sum(sizes[taken:]) < MOST_ELEMENTS:
                    sizes.append(elements_of(_take(iterator)))
            getattr(iterator, "_shutdown_workers", int)()
            if (largest := max(sizes)) > most:
                number = sizes.index(largest) + 1
                needed = math.ceil(number / (taken // steps or taken / steps))
                found.append({"batch": number, "elements": largest, "rehearsed": most, "steps": needed})

    thread = Thread(target=look, daemon=True)  # a dataset may wait forever
    thread.start()
    thread.join(MOST_S)
    for sizes in _epochs.values():
        if not found and sorted({*sizes}) == sizes and sizes[-1] > LEAST_GROWTH * sizes[0]:
            return {"first": sizes[0], "last": sizes[-1]}
    return max(found, key=lambda each: each["elements"] / each["rehearsed"], default={})


def elements_of(batch: Any) -> int:
    """Return how many elements the tensors of a batch have."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    parts = batch if isinstance(batch, Mapping) else vars(batch) if hasattr(batch, "to") else {}
    return sum(map(elements_of, batch if isinstance(batch, list | tuple) else parts.values()))
