"""A training step without data, or one stage of it: what it allocates, recorded for any number of rows and tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.memory.phases import measuring_phases
from torchtune_adaptive.prediction.recorder import Recorder, Recording
from torchtune_adaptive.prediction.shims import CUDA_WORKSPACES, DeviceStandIn
from torchtune_adaptive.prediction.work import WorkCounter
from torchtune_adaptive.step.runner import Totals
from torchtune_adaptive.tune.parts.memory_limit import resident_tensors
from torchtune_adaptive.tune.parts.samples import Kind, Sample
from torchtune_adaptive.tune.plan.shims import fake_tables
from torchtune_adaptive.tune.start.settings import Settings


@dataclass(frozen=True, kw_only=True)
class FakeStep:
    """A training step, or one stage of it, built once."""

    settings: Settings
    model: nn.Module
    """What a microbatch runs."""
    beside: Sequence[nn.Module] = ()
    """Models of other stages, which stay in memory."""
    run: Callable[[Sequence[Sample]], Totals]
    """One microbatch."""
    update: Callable[[Totals], object]
    """What follows the last one."""
    optimizers: Sequence[torch.optim.Optimizer]
    """Those whose state is in memory."""
    boundaries: Mapping[str, nn.Module]
    """What cuts the step into phases."""
    tokens_multiple: int = 1
    """Sequences are cut into so many chunks of one length."""
    kind: Kind
    found_before: Sample = field(default_factory=dict)
    """What an earlier stage has left in each sample."""
    fakes: FakeTensorMode
    device_stand_in: DeviceStandIn
    device: torch.device
    """Where fakes count: what is offloaded is on another."""
    on_gpu: bool

    def record(self, rows: int, tokens: int, *, counting: bool = False) -> Recording:
        """What one step allocates, beginning with what is resident; `counting`: what its kernels do, too."""
        recorder = Recorder(CUDA_WORKSPACES if self.on_gpu else {}, WorkCounter() if counting else None)
        gc.collect()
        with self.fakes, recorder, self.device_stand_in:
            recorder.count(self._resident(()))
            weights = recorder.events
            recorder.count(self._resident(self.optimizers))
            resident = {"weights": weights, "optimizer state": recorder.events}
            with measuring_phases(_Clock(recorder), self.model, self.boundaries) as meter:
                totals = self._run_microbatches(rows, tokens)
                meter.begin_update()
                self.update(totals)
                meter.end_phase()
        return recorder.recording(resident | meter.peaks)

    @property
    def host_bytes(self) -> int:
        """What is offloaded to the host between two steps, gradients included."""
        parameters = (parameter for model in (self.model, *self.beside) for parameter in model.parameters())
        gradients = [parameter for parameter in parameters if parameter.requires_grad]
        plain = [each for tensor in [*self._kept(self.optimizers), *gradients] for each in plain_tensors(tensor)]
        return sum(each.untyped_storage().nbytes() for each in plain if each.device != self.device)

    def _resident(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        """What is on the device between two steps."""
        return [tensor for tensor in self._kept(optimizers) if tensor.device == self.device]

    def _kept(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        beside = [tensor for model in self.beside for tensor in resident_tensors(model, ())]
        return [*beside, *resident_tensors(self.model, optimizers)]

    def _run_microbatches(self, rows: int, tokens: int) -> Totals:
        """One microbatch; where the config accumulates gradients, one of the smallest before it, which leaves some."""
        sequences = self.kind.uniform(0, self.kind.length_at(tokens))
        sample: Sample = {**sequences, "input_pos": [0] * tokens, **self.found_before}
        if self.settings.gradient_accumulation_steps == 1:
            return self.run([sample] * rows)
        # eager where all else is compiled: a program of its own for this size would take longer than all others
        with torch.compiler.set_stance("force_eager"):
            totals = self.run([self.kind.stand_in(sample)])
        return totals.plus(self.run([sample] * rows))

    def run_first(self) -> None:
        """Brings everything to where it is in training: optimizer state, FSDP's streams, sharding propagation."""
        with self.fakes, self.device_stand_in, torch.compiler.set_stance("force_eager"):
            self.device_stand_in.calibrate()
            self._step(rows=1, tokens=16)

    def compile_update(self) -> None:
        """For an optimizer that compiles what it does to each parameter."""
        with self.fakes, self.device_stand_in:
            states = [each.state.values() for each in self.optimizers]
            fake_tables((value for state in states for values in state for value in values.values()), self.fakes)
            self._step(rows=1, tokens=16)

    def compile_for(self, rows: int, tokens: int) -> None:
        """Compiles anew, for any size, but as is best for this one: the order in which gradients are computed, say.

        Dynamo makes sizes variable where it meets a second one; the first is small, and other in both.
        """
        torch.compiler.reset()
        with self.fakes, self.device_stand_in:
            self._step(rows + 1, tokens=16)
            self._step(rows, tokens)

    def _step(self, rows: int, tokens: int) -> None:
        self.update(self._run_microbatches(rows, tokens))


class _Clock:
    """Counts events in place of bytes, so that the peak of a phase is where it ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def peak_bytes(self) -> int:
        return self._recorder.events

    def reset_peak(self) -> None:
        pass
