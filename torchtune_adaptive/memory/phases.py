"""The peak of each phase of a step by itself: read and reset on the host, where hooks see a phase end.

Which phase needs the most changes with the rows, so the peak of the whole step follows no line, but that of each
phase does. Boundaries cut the forward at the outputs of modules, and the backward at the gradients of those outputs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_iter

UPDATE = "update"


class PeakMeter(Protocol):
    """What a phase is measured with."""

    @property
    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...


def phase_names(boundaries: Mapping[str, nn.Module]) -> list[str]:
    """The phases in the order they run. A boundary bears the name of the part of the model that it ends."""
    if not boundaries:
        return ["forward and backward", UPDATE]
    forward = [f"{part} forward" for part in boundaries]
    backward = [f"{part} backward" for part in reversed(list(boundaries))]
    return [*forward, "loss", *backward, UPDATE]


class PhaseMeter:
    """Notes the peak of each phase of one step, which may have several microbatches."""

    def __init__(self, memory: PeakMeter, boundaries: Mapping[str, nn.Module]) -> None:
        self.peaks: dict[str, int] = {}
        self._memory = memory
        self._names = phase_names(boundaries)
        self._last = len(self._names) - 2  # the phase before the update
        self._phase = 0
        memory.reset_peak()

    def end_phase(self) -> None:
        """Counts the peak since the last call for the phase that runs."""
        name = self._names[self._phase]
        self.peaks[name] = max(self.peaks.get(name, 0), self._memory.peak_bytes)
        self._memory.reset_peak()

    def begin_update(self) -> None:
        self.end_phase()
        self._phase = len(self._names) - 1

    def begin_microbatch(self, *_: object) -> None:
        self.end_phase()
        self._phase = 0

    def at_output(self, boundary: int, module: nn.Module, args: object, output: object) -> None:
        """The forward has reached a boundary; the backward will come back to the same tensor."""
        # Activation checkpointing runs forwards again inside the backward: later phases stay what they are.
        if self._phase > boundary:
            return
        self._begin(boundary + 1)
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._at_gradient, boundary))

    def _at_gradient(self, boundary: int, gradient: torch.Tensor) -> None:
        self._begin(self._last - boundary)

    def _begin(self, phase: int) -> None:
        self.end_phase()
        self._phase = phase


@contextmanager
def measuring_phases(memory: PeakMeter, model: nn.Module, boundaries: Mapping[str, nn.Module]) -> Iterator[PhaseMeter]:
    """Watches the boundaries, given in the order of the forward."""
    meter = PhaseMeter(memory, boundaries)
    # Before FSDP's own hook, which gathers parameters.
    handles = [model.register_forward_pre_hook(meter.begin_microbatch, prepend=True)]
    for index, module in enumerate(boundaries.values()):
        handles.append(module.register_forward_hook(partial(meter.at_output, index)))
    try:
        yield meter
    finally:
        for handle in handles:
            handle.remove()
