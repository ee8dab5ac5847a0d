"""GPUs by name: memory as torch reports it, compute capability, and peak rates (sources: docs/rehearsing.md).

A file of the user contains rates that `tune-adaptive rehearse --calibrate` measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from torchtune_adaptive.null_cuda import cache_folder

Curve = Sequence[tuple[float, float]]
"""Pairs of a kernel's FLOPs and the TFLOP/s that it reached, in ascending order of FLOPs."""


class Rates(NamedTuple):
    """Peak rates of a GPU: dense TFLOP/s by type, then GB/s. Then shares of them and times that kernels reach."""

    bf16: float
    fp8: float
    """On GPUs without fp8, of int8."""
    tf32: float
    fp32: float
    memory: float
    link: float
    """To the other GPUs of a machine, in one direction: NVLink or else PCIe."""
    pcie: float
    network: float
    """To other machines, each GPU's share in one direction."""
    matmul_efficiency: float
    """Share of the peak that matrix multiplications reach."""
    memory_efficiency: float = 0.9
    kernel_s: float = 2e-6
    """The shortest kernel."""
    launch_s: float = 8e-6
    """The host's time to launch a kernel from Python."""
    curves: Mapping[str, Curve] = {}
    """Measured rates by kind of kernel; empty if the GPU was not calibrated."""

    def peak(self, kind: str) -> float:
        """Return the FLOP/s of a kind of kernel at most."""
        return float(getattr(self, {"fp16": "bf16", "attention": "bf16"}.get(kind, kind))) * 1e12

    def seconds(self, kind: str, flops: float) -> float:
        """Return the time that a kernel computes."""
        curve = self.curves.get(kind)
        return flops / (_rate(curve, flops) * 1e12 if curve else self.peak(kind) * self.matmul_efficiency)


def _rate(curve: Curve, flops: float) -> float:
    """Interpolate between the measured sizes, on a logarithmic axis."""
    flops = min(max(flops, curve[0][0]), curve[-1][0])
    (low, slow), (high, fast) = next(pair for pair in pairwise(curve) if flops <= pair[1][0])
    return slow + (fast - slow) * math.log(flops / low) / math.log(high / low)


class Gpu(NamedTuple):
    """A model of GPU."""

    memory: int
    """In bytes."""
    capability: str
    name: str = ""
    rates: Rates | None = None


H100 = Rates(989, 1979, 495, 67, 3350, 450, 64, 50, 0.45)
A100 = Rates(312, 624, 156, 19.5, 2039, 300, 32, 25, 0.65)


def _gpu(gib: float, capability: str, rates: Rates) -> Gpu:
    return Gpu(int(gib * 2**30), capability, rates=rates)


_CARDS = {
    "a10": _gpu(22.0, "8.6", Rates(125, 250, 62.5, 31.2, 600, 32, 32, 1.6, 0.65)),
    "a10g": _gpu(22.0, "8.6", Rates(70, 140, 35, 35, 600, 32, 32, 1.6, 0.65)),
    "a100": _gpu(79.1, "8.0", A100),
    "a100-40": _gpu(39.4, "8.0", A100._replace(memory=1555)),
    "a6000": _gpu(47.5, "8.6", Rates(154.8, 309.7, 77.4, 38.7, 768, 32, 32, 1.6, 0.65)),
    "b200": _gpu(178.3, "10.0", Rates(2250, 4500, 1125, 75, 7700, 900, 64, 50, 0.45)),
    "h100": _gpu(79.1, "9.0", H100),
    "h200": _gpu(139.7, "9.0", H100._replace(memory=4800)),
    "l4": _gpu(22.0, "8.9", Rates(121, 242, 60, 30.3, 300, 32, 32, 1.6, 0.65)),
    "l40s": _gpu(44.4, "8.9", Rates(362, 733, 183, 91.6, 864, 32, 32, 1.6, 0.65)),
    "t4": _gpu(14.6, "7.5", Rates(65, 130, 8.1, 8.1, 320, 16, 16, 1.6, 0.65)),
    "3090": _gpu(23.6, "8.6", Rates(71, 284, 35.6, 35.6, 936, 32, 32, 1.6, 0.65)),
    "4090": _gpu(23.6, "8.9", Rates(165, 330, 82.6, 82.6, 1008, 32, 32, 1.6, 0.65)),
    "5090": _gpu(31.3, "12.0", Rates(210, 419, 105, 105, 1792, 64, 64, 1.6, 0.65)),
}
GPUS = {name: card._replace(name=name) for name, card in _CARDS.items()}


def local_gpu(found: Gpu) -> Gpu:
    """Return a GPU that torch has named, with the name and the rates that rehearsals know."""
    words = re.split(r"[ -]", found.name.lower().replace("nvidia ", ""))
    names = [name for name in GPUS if name.partition("-")[0] in words]
    name = min(names, key=lambda name: abs(GPUS[name].memory - found.memory), default="-".join(words))
    return found._replace(name=name, rates=known_gpus().get(name, found).rates)


def calibration_file() -> Path:
    """Return the path of the user's measured rates."""
    return cache_folder() / "gpus.json"


def known_gpus() -> dict[str, Gpu]:
    """Return the GPUs of the table and those that were calibrated. Raises ValueError."""
    file = calibration_file()
    try:
        measured = json.loads(file.read_text()) if file.exists() else {}
        return GPUS | {name: Gpu(**{**gpu, "rates": Rates(**gpu["rates"])}) for name, gpu in measured.items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{file} is not a valid calibration: remove it, and run --calibrate again") from error
