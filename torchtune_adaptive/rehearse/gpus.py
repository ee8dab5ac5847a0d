"""GPUs by name: their memory as torch reports it, and their compute capability."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """A model of GPU."""

    memory: int
    """In bytes."""
    capability: str


def _gpu(gib: float, capability: str) -> Gpu:
    return Gpu(int(gib * 2**30), capability)


GPUS = {
    "a10": _gpu(22.0, "8.6"),
    "a10g": _gpu(22.0, "8.6"),
    "a100": _gpu(79.1, "8.0"),
    "a100-40": _gpu(39.4, "8.0"),
    "a6000": _gpu(47.5, "8.6"),
    "b200": _gpu(178.3, "10.0"),
    "h100": _gpu(79.1, "9.0"),
    "h200": _gpu(139.7, "9.0"),
    "l4": _gpu(22.0, "8.9"),
    "l40s": _gpu(44.4, "8.9"),
    "t4": _gpu(14.6, "7.5"),
    "3090": _gpu(23.6, "8.6"),
    "4090": _gpu(23.6, "8.9"),
    "5090": _gpu(31.3, "12.0"),
}
