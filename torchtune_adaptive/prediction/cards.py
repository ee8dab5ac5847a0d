"""Memory of graphics cards by name, as torch reports it: less than the name says in some, more in others."""

from __future__ import annotations

from typing import Any

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.sizes import MemorySize, parse_size
from torchtune_adaptive.wording import did_you_mean

GIB_OF_CARD = {
    "a10": 22.0,
    "a10g": 22.0,
    "a100": 79.1,
    "a100-40": 39.4,
    "a100-80": 79.1,
    "a6000": 47.5,
    "b200": 178.3,
    "h100": 79.1,
    "h200": 139.7,
    "l4": 22.0,
    "l40s": 44.4,
    "t4": 14.6,
    "v100": 15.7,
    "v100-32": 31.7,
    "3090": 23.6,
    "4090": 23.6,
    "5090": 31.3,
}

WITHOUT_FLASH_ATTENTION = ("t4", "v100", "v100-32")
"""Older than the kernels that a prediction assumes, and than bf16."""


def limit_bytes(value: Any, key: str) -> int:
    """Bytes of an amount (24GiB, 80GB) or of a card (h100)."""
    name = str(value).strip().lower()
    if name in GIB_OF_CARD:
        return int(GIB_OF_CARD[name] * 2**30)
    try:
        size = parse_size(value, key)
    except ConfigError as error:
        cards = did_you_mean(name, GIB_OF_CARD, most=3) or f"; known are {', '.join(GIB_OF_CARD)}"
        raise ConfigError(f"{error}; or a card by its name{cards}") from error
    return amount_bytes(size, key)


def amount_bytes(size: MemorySize, key: str) -> int:
    """Bytes of an amount that has to be known without a device."""
    if size.is_fraction:
        raise ConfigError(
            f"{key}: {size.amount:g} is a fraction of no known device; give an amount (24GiB) or a card (h100)"
        )
    return int(size.amount)
