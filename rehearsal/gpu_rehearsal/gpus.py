"""GPUs by name: memory as torch reports it, compute capability, and peak rates (sources: docs/time.md)."""

from __future__ import annotations

from typing import NamedTuple

from gpu_rehearsal.errors import ConfigError


class Rates(NamedTuple):
    """Peak rates of a GPU (dense TFLOP/s by type, then GB/s), and how closely kernels reach them."""

    bf16: float
    """Also the rate of fp16."""
    fp8: float
    """On GPUs without fp8, the rate of int8."""
    tf32: float
    fp32: float
    memory: float
    link: float
    """To another GPU of the machine, in one direction: NVLink or, without it, PCIe."""
    pcie: float
    network: float
    """To other machines, per GPU and in one direction."""
    matmul_efficiency: float
    """The fraction of the peak that matrix multiplications reach."""
    flash_efficiency: float | None = None
    """The same for FlashAttention 2, if it differs."""


class Gpu(NamedTuple):
    """A model of GPU."""

    memory: int
    """In bytes."""
    capability: str
    name: str = ""
    rates: Rates | None = None


H100 = Rates(989, 1979, 495, 67, 3350, 450, 64, 50, 0.45, flash_efficiency=335 / 989)
A100 = Rates(312, 624, 156, 19.5, 2039, 300, 32, 25, 0.65)

_CARDS: dict[str, tuple[float, str, Rates]] = {
    "a10": (22.0, "8.6", Rates(125, 250, 62.5, 31.2, 600, 32, 32, 1.6, 0.65)),
    "a10g": (22.0, "8.6", Rates(70, 140, 35, 35, 600, 32, 32, 1.6, 0.65)),
    "a100": (79.1, "8.0", A100),
    "a100-40": (39.4, "8.0", A100._replace(memory=1555)),
    "a6000": (47.5, "8.6", Rates(154.8, 309.7, 77.4, 38.7, 768, 32, 32, 1.6, 0.65)),
    "b200": (178.3, "10.0", Rates(2250, 4500, 1125, 75, 7700, 900, 64, 50, 0.45)),
    "h100": (79.1, "9.0", H100),
    "h200": (139.7, "9.0", H100._replace(memory=4800)),
    "l4": (22.0, "8.9", Rates(121, 242, 60, 30.3, 300, 32, 32, 1.6, 0.65)),
    "l40s": (44.4, "8.9", Rates(362, 733, 183, 91.6, 864, 32, 32, 1.6, 0.65)),
    "t4": (14.6, "7.5", Rates(65, 130, 8.1, 8.1, 320, 16, 16, 1.6, 0.65)),
    "3090": (23.6, "8.6", Rates(71, 284, 35.6, 35.6, 936, 32, 32, 1.6, 0.65)),
    "4090": (23.6, "8.9", Rates(165, 330, 82.6, 82.6, 1008, 32, 32, 1.6, 0.65)),
    "5090": (31.3, "12.0", Rates(210, 419, 105, 105, 1792, 64, 64, 1.6, 0.65)),
}
"""Memory in GiB, compute capability, rates."""
GPUS = {name: Gpu(int(gib * 2**30), version, name, rates) for name, (gib, version, rates) in _CARDS.items()}


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name. Raise a ConfigError if there is none."""
    if (gpu := GPUS.get(name.lower())) is None:
        raise ConfigError(f"unknown GPU {name!r}: choose from {', '.join(sorted(GPUS))}")
    return gpu
