"""Estimate the seconds of a step from its work and the rates of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpu_rehearsal.gpus import Rates

BF16, FP8, TF32, FP32 = "bf16", "fp8", "tf32", "fp32"
MEMORY, HOST = "memory", "host"


class Operation(NamedTuple):
    """A kernel, or a copy between host and GPU."""

    kind: str
    """The type of its matrices, for example BF16; MEMORY for other kernels; HOST for a copy between host and GPU."""
    flops: float
    bytes: int
    flash: bool = False
    """True for FlashAttention 2."""


class Transfer(NamedTuple):
    """A collective."""

    bytes: int
    """The bytes of the whole tensor: the output of a gather, or the input of a reduction."""
    share: float
    """The fraction of these bytes that a rank sends."""
    ranks: int
    per_machine: int
    """The number of ranks of the group on one machine."""
    hidden: bool
    """True if the collective overlaps with computation, False if computation waits for it."""


class Work(NamedTuple):
    """The work of a rank in a step."""

    operations: Sequence[tuple[Operation, int]]
    """Each kind of kernel, and how often it runs."""
    collectives: Sequence[tuple[Transfer, int]]
    tokens: int
    """0 if unknown."""
    samples: int
    ranks_per_sample: int = 1
    """The number of ranks that process the same sample, for example under tensor parallelism."""

    @classmethod
    def from_json(cls, found: Any) -> Work:
        """Read the JSON of a Work."""
        operations, collectives, *rest = found
        return cls(
            [(Operation(*each), times) for each, times in operations],
            [(Transfer(*each), times) for each, times in collectives],
            *rest,
        )

    def totals(self, ranks: int) -> dict[str, Any]:
        """Return the work of a step on this rank, and the tokens and samples of all ranks."""
        return {
            "flops": sum(each.flops * times for each, times in self.operations),
            "memory_bytes": sum(each.bytes * times for each, times in self.operations if each.kind != HOST),
            "host_copy_bytes": sum(each.bytes * times for each, times in self.operations if each.kind == HOST),
            "collective_bytes": sum(each.bytes * times for each, times in self.collectives),
            "kernels": sum(times for _, times in self.operations),
            "tokens_per_step": self.tokens * ranks // self.ranks_per_sample or None,
            "samples_per_step": self.samples * ranks // self.ranks_per_sample or None,
        }


LINK_EFFICIENCY, COLLECTIVE_S = 0.7, 20e-6
"""The fraction of the bandwidth that collectives reach, and their latency."""
MEMORY_EFFICIENCY, KERNEL_S, LAUNCH_S = 0.9, 2e-6, 8e-6
"""The fraction of the bandwidth that kernels reach, the shortest kernel, and the host's time to launch a kernel."""
UNCERTAINTY = 0.8, 1.35
"""Most measured times are between these multiples of the estimate (see docs/time.md and docs/measured.md)."""


class StepTime(NamedTuple):
    """The estimated duration of a step, and its parts."""

    seconds: float
    parts: dict[str, float]
    """The seconds of each resource. Launches and overlapped communication do not add to the others."""
    limit: str
    """The resource that determines the duration."""

    @property
    def range(self) -> tuple[float, float] | None:
        """Return the shortest and the longest time that a measurement should give; None if the host decides it."""
        low, high = UNCERTAINTY
        return None if self.limit == LAUNCHES else (self.seconds * low, self.seconds * high)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        return {**self._asdict(), "range": self.range}


COMPUTE, BANDWIDTH, COMMUNICATION = "compute", "memory bandwidth", "communication"
OVERLAPPED, COPIES, LAUNCHES = "overlapped communication", "copies between host and GPU", "kernel launches"


def estimate(work: Work, rates: Rates) -> StepTime:
    """Estimate a step with this work."""
    parts = dict.fromkeys((COMPUTE, BANDWIDTH, COMMUNICATION, OVERLAPPED, COPIES, LAUNCHES), 0.0)
    for operation, count in work.operations:
        parts[LAUNCHES] += count * LAUNCH_S
        if operation.kind == HOST:
            parts[COPIES] += count * (operation.bytes / (rates.pcie * 1e9 * LINK_EFFICIENCY) + KERNEL_S)
            continue
        computing = operation.flops / (getattr(rates, operation.kind) * 1e12) if operation.flops else 0.0
        moving = operation.bytes / (rates.memory * 1e9)
        computing /= (operation.flash and rates.flash_efficiency) or rates.matmul_efficiency
        moving = max(moving / MEMORY_EFFICIENCY, KERNEL_S)
        parts[COMPUTE if computing > moving else BANDWIDTH] += count * max(computing, moving)
    for collective, times in work.collectives:
        parts[OVERLAPPED if collective.hidden else COMMUNICATION] += times * _communicates(collective, rates)
    busy = parts[COMPUTE] + parts[BANDWIDTH] + parts[COMMUNICATION]
    most = max((OVERLAPPED, COPIES, LAUNCHES), key=lambda name: parts[name])
    largest = max((COMPUTE, BANDWIDTH, COMMUNICATION), key=lambda name: parts[name])
    return StepTime(max(busy, parts[most]), parts, most if parts[most] > busy else largest)


def time_lines(time: StepTime, work: Work, gpu: str, ranks: int) -> list[str]:
    """Return the lines of a report about the time of a step."""
    span = f"estimated: {' to '.join(map(seconds_text, time.range))}" if time.range else "or more: the host limits it"
    lines = {f"time per step on {gpu}": f"{seconds_text(time.seconds)} ({span})"}
    unit, count = ("tokens", work.tokens) if work.tokens else ("samples", work.samples)
    if count:
        each = count / work.ranks_per_sample / time.seconds
        total = f" each, {each * ranks:,.0f} on {ranks} ranks" if ranks > 1 else ""
        lines[f"{unit} per second"] = f"{each:,.0f}{total}"
    others = [
        name for name in (COMPUTE, BANDWIDTH, COMMUNICATION, OVERLAPPED) if time.parts[name] > 0.05 * time.seconds
    ]
    parts = [time.limit, *(name for name in others if name != time.limit)]
    lines["limited by"] = ", ".join(f"{name} ({seconds_text(time.parts[name])})" for name in parts)
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def seconds_text(seconds: float) -> str:
    """Return a duration with two or three digits, for example 2.84 s or 31 ms."""
    for unit, size in ("s", 1.0), ("ms", 1e-3):
        if seconds >= size:
            return f"{seconds / size:.{max(0, 2 - len(str(int(seconds / size))) + 1)}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _communicates(collective: Transfer, rates: Rates) -> float:
    """Return the seconds of a collective, whose ranks form a ring."""
    within = collective.ranks <= collective.per_machine
    rate = rates.link if within else min(rates.link, rates.network * collective.per_machine)
    return collective.bytes * collective.share / (rate * 1e9 * LINK_EFFICIENCY) + COLLECTIVE_S
