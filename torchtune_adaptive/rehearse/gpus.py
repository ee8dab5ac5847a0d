"""Cards by name: their memory as torch reports it, which is not quite the name's, and their compute capability."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    gib: float
    capability: str

    @property
    def memory(self) -> int:
        return int(self.gib * 2**30)


GPUS = {
    "a10": Gpu(22.0, "8.6"),
    "a10g": Gpu(22.0, "8.6"),
    "a100": Gpu(79.1, "8.0"),
    "a100-40": Gpu(39.4, "8.0"),
    "a6000": Gpu(47.5, "8.6"),
    "b200": Gpu(178.3, "10.0"),
    "h100": Gpu(79.1, "9.0"),
    "h200": Gpu(139.7, "9.0"),
    "l4": Gpu(22.0, "8.9"),
    "l40s": Gpu(44.4, "8.9"),
    "t4": Gpu(14.6, "7.5"),
    "v100": Gpu(15.7, "7.0"),
    "v100-32": Gpu(31.7, "7.0"),
    "3090": Gpu(23.6, "8.6"),
    "4090": Gpu(23.6, "8.9"),
    "5090": Gpu(31.3, "12.0"),
}
