"""Measure the rates of this machine's GPU and store them for rehearsals: `tune-adaptive rehearse --calibrate`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.rehearse.gpus import Curve, Gpu, Rates, calibration_file, known_gpus, local_gpu
from torchtune_adaptive.rehearse.step_time import ATTENTION, BF16, FP16, FP32, TF32

SIZES = 512, 1024, 2048, 4096, 8192
"""Rows and columns of the square matrices."""
LENGTHS = 512, 2048, 8192
"""Tokens of the attention's samples."""
HEADS, HEAD_DIM, TOKENS = 16, 128, 16384
BYTES, LAYERS, KERNELS = 2**28, 200, 500
MEASURED_S = 0.8
"""Duration of a measurement: under load, the power limit lowers the clock rate."""
_TYPES = {
    BF16: (torch.bfloat16, "ieee"), FP16: (torch.float16, "ieee"), TF32: (torch.float32, "tf32"),
    FP32: (torch.float32, "ieee"),
}  # fmt: skip


def main() -> None:
    """Measure, print and store the rates of the current GPU."""
    if not torch.cuda.device_count():
        sys.exit("error: torch finds no GPU on this machine: calibrate on a machine that has one")
    about, file = torch.cuda.get_device_properties(0), calibration_file()
    try:
        gpu, others = local_gpu(Gpu(about.total_memory, f"{about.major}.{about.minor}", about.name)), known_gpus()
    except ValueError as error:
        sys.exit(f"error: {error}")
    curves: dict[str, Curve] = {kind: [_matrices(kind, size) for size in SIZES] for kind in _TYPES}
    curves[ATTENTION] = [_attention(length) for length in LENGTHS]
    for kind, curve in curves.items():
        print(f"{kind:>9}  {' '.join(f'{rate:6.1f}' for _, rate in curve)} TFLOP/s")
    bandwidth, kernel_s, launch_s = _bandwidth(), _shortest_kernel(), _launch()
    print(f"   memory  {bandwidth:,.0f} GB/s")
    print(f"  kernels  at least {kernel_s * 1e6:.1f} µs; the host launches one in {launch_s * 1e6:.1f} µs")
    bf16, tf32, fp32 = (max(rate for _, rate in curves[kind]) for kind in (BF16, TF32, FP32))
    peaks = gpu.rates or Rates(bf16, 2 * bf16, tf32, fp32, bandwidth, 32, 32, 1.6, 1)  # PCIe, Ethernet of 100 Gb/s
    rates = peaks._replace(
        matmul_efficiency=bf16 / peaks.bf16, memory_efficiency=bandwidth / peaks.memory, kernel_s=kernel_s,
        launch_s=launch_s, curves=curves,
    )  # fmt: skip
    cards = [card for card in others.values() if card.rates and card.rates.curves] + [gpu._replace(rates=rates)]
    stored = {card.name: {**card._asdict(), "rates": card.rates and card.rates._asdict()} for card in cards}
    replace_file(file, json.dumps(stored, indent=1).encode())
    print(f"{file} has these rates of {about.name}. Rehearsals with --gpu {gpu.name} use them.")


def _timed(run: Callable[[], object], calls: int) -> float:
    """Return the seconds of a call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / calls


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call under load: the clock rate needs some time to settle."""
    run()
    return _timed(run, int(MEASURED_S / _timed(run, 5)) + 1)


def _matrices(kind: str, size: int) -> tuple[float, float]:
    """Return the FLOPs of a product, and its TFLOP/s. Random numbers matter: zeros take less power."""
    dtype, precision = _TYPES[kind]
    torch.backends.cuda.matmul.fp32_precision = precision
    first, second = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    product, flops = torch.empty_like(first), 2.0 * size**3
    return flops, flops / _seconds(lambda: torch.mm(first, second, out=product)) / 1e12


def _attention(length: int) -> tuple[float, float]:
    """Return the FLOPs of causal attention forward and backward, per kernel, and the TFLOP/s of both together."""
    shape = TOKENS // length, HEADS, length, HEAD_DIM
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    flops = 4.0 * TOKENS * HEADS * length * HEAD_DIM / 2 * 3.5
    return flops / 2, flops / _seconds(run) / 1e12


def _bandwidth() -> float:
    """Return the GB/s of elementwise operations that read or write more than a cache holds."""
    first = torch.randn(BYTES // 2, device="cuda", dtype=torch.bfloat16)
    second, wide = torch.empty_like(first), torch.empty_like(first, dtype=torch.float32)
    seconds = _seconds(lambda: torch.add(first, second, out=second)) + _seconds(lambda: wide.copy_(first))
    return 6 * BYTES / seconds / 1e9


def _shortest_kernel() -> float:
    """Return the seconds of a kernel without work, in a queue that never empties."""
    tiny = torch.zeros(1, device="cuda")
    tiny.add_(1)
    torch.cuda._sleep(10**8)
    return _timed(lambda: tiny.add_(1), KERNELS)


def _launch() -> float:
    """Return the host's seconds per kernel in forward and backward of a narrow model, which has five per layer."""
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU())]
    model, rows = torch.nn.Sequential(*layers).cuda(), torch.randn(64, 64, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(rows).sum().backward()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return best / (5 * LAYERS)


if __name__ == "__main__":
    main()
