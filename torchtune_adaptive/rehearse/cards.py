"""Cards by name: their memory as torch reports it, which is not quite the name's, and their compute capability."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    gib: float
    capability: str

    @property
    def memory(self) -> int:
        return int(self.gib * 2**30)


CARDS = {
    "a10": Card(22.0, "8.6"),
    "a10g": Card(22.0, "8.6"),
    "a100": Card(79.1, "8.0"),
    "a100-40": Card(39.4, "8.0"),
    "a6000": Card(47.5, "8.6"),
    "b200": Card(178.3, "10.0"),
    "h100": Card(79.1, "9.0"),
    "h200": Card(139.7, "9.0"),
    "l4": Card(22.0, "8.9"),
    "l40s": Card(44.4, "8.9"),
    "t4": Card(14.6, "7.5"),
    "v100": Card(15.7, "7.0"),
    "v100-32": Card(31.7, "7.0"),
    "3090": Card(23.6, "8.6"),
    "4090": Card(23.6, "8.9"),
    "5090": Card(31.3, "12.0"),
}
