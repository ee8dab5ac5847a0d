"""Graphics cards by name: memory as torch reports it, less than the name says in some, more in others; speeds as their
makers state them."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory_sizes import parse_amount
from torchtune_adaptive.wording import did_you_mean


@dataclass(frozen=True)
class Card:
    """What one has, at most. Floating-point operations are of dense matrices, in 16 bits added up in 32."""

    gib: float
    half_flops: float
    flops: float
    """Operations per second in 32 bits, without TF32, which torch does not use unless told to."""
    bytes_per_s: float
    """Bandwidth of the card's own memory."""
    link_bytes_per_s: float
    """Bandwidth to the other cards of a machine, in one direction."""
    host_bytes_per_s: float
    """Bandwidth to the host, in one direction."""
    launch_s: float = 8e-6
    """What Python and torch take for one kernel."""
    queues: bool = True
    """Whether kernels are launched while others run."""


PCIE_3, PCIE_4, PCIE_5 = 16.0, 32.0, 64.0


def _card(gib: float, half: float, full: float, memory: float, link: float, host: float = PCIE_4) -> Card:
    """A card from TFLOP/s and GB/s."""
    return Card(gib, half * 1e12, full * 1e12, memory * 1e9, link * 1e9, host * 1e9)


CARDS = {
    "a10": _card(22.0, 125, 31.2, 600, PCIE_4),
    "a10g": _card(22.0, 70, 35, 600, PCIE_4),
    "a100": _card(79.1, 312, 19.5, 2039, 300),
    "a100-40": _card(39.4, 312, 19.5, 1555, 300),
    "a100-80": _card(79.1, 312, 19.5, 2039, 300),
    "a6000": _card(47.5, 155, 38.7, 768, PCIE_4),
    "b200": _card(178.3, 2250, 75, 8000, 900, PCIE_5),
    "h100": _card(79.1, 989, 67, 3350, 450, PCIE_5),
    "h200": _card(139.7, 989, 67, 4800, 450, PCIE_5),
    "l4": _card(22.0, 121, 30.3, 300, PCIE_4),
    "l40s": _card(44.4, 362, 91.6, 864, PCIE_4),
    "t4": _card(14.6, 65, 8.1, 320, PCIE_3, PCIE_3),
    "v100": _card(15.7, 125, 15.7, 900, 150, PCIE_3),
    "v100-32": _card(31.7, 125, 15.7, 900, 150, PCIE_3),
    "3090": _card(23.6, 71, 35.6, 936, PCIE_4),
    "4090": _card(23.6, 165, 82.6, 1008, PCIE_4),
    "5090": _card(31.3, 209, 104.8, 1792, PCIE_5, PCIE_5),
}

ONE_CORE = Card(0, 1.6e11, 1.6e11, 2e10, 5e9, 1e10, launch_s=1e-5, queues=False)
"""One core of a server's CPU, as `python -m benchmarks --only advice` measures one."""

WITHOUT_FLASH_ATTENTION = ("t4", "v100", "v100-32")
"""Older than the kernels that a prediction assumes, and than bf16."""


def card_named(value: object) -> Card | None:
    """The card of that name; None for an amount, or anything else that names no card."""
    return CARDS.get(str(value).strip().lower())


def limit_bytes(value: object, key: str) -> int:
    """Bytes of an amount (24GiB, 80GB) or of a card (h100)."""
    if (card := card_named(value)) is not None:
        return int(card.gib * 2**30)
    try:
        return parse_amount(value, key)
    except ConfigError as error:
        name = str(value).strip().lower()
        cards = did_you_mean(name, CARDS, most=3) or f"; known: {', '.join(CARDS)}"
        raise ConfigError(f"{error}; or the name of a card{cards}") from error
