"""A training step without data, or one stage of it: what it allocates, recorded for any number of rows and tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtune_adaptive.comm import fsdp
from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.memory.phases import measuring_phases
from torchtune_adaptive.prediction.recorder import Recorder, Recording
from torchtune_adaptive.prediction.shims import CUDA_WORKSPACES, HOST, UPLOAD, DeviceStandIn
from torchtune_adaptive.prediction.work import WorkCounter
from torchtune_adaptive.step.runner import Totals
from torchtune_adaptive.tune.config.settings import Settings, on_gpu
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.parts.optimization.optimizer import Optimization
from torchtune_adaptive.tune.rl.models import give_gradients
from torchtune_adaptive.tune.trace.shims import fake_tables

T = TypeVar("T")


@dataclass(frozen=True)
class FakeDevice:
    """What stands for a device while nothing is computed."""

    fakes: FakeTensorMode
    stand_in: DeviceStandIn
    counts: torch.device
    """Where fakes count: what is offloaded is on another."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self.fakes, self.stand_in:
            yield


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a FakeStep knows of its samples."""

    sample_of: Callable[[int], Any]
    """A row of so many tokens."""
    stand_in: Callable[[Any], Any]
    """The least that goes through the model like such a row."""
    padded: bool = True
    """Whether rows of a microbatch are padded to the longest, or stand one after another."""
    sequences: int = 1
    """Sequences of a row, each of so many tokens."""
    answer_tokens: int = 0
    """Tokens of a row besides those that are asked about."""
    accumulates: bool = False
    """Whether a step has several microbatches."""
    most: int | None = None
    """Most rows of a microbatch, where a rank has no more in this stage; None: as many as fit."""

    def tokens_of_row(self, tokens: int) -> int:
        """Tokens of a row, if it is asked about so many."""
        return self.sequences * (tokens + self.answer_tokens)


@dataclass(frozen=True, kw_only=True)
class FakeStep:
    """A training step, or one stage of it, built once."""

    settings: Settings
    device: FakeDevice
    rows: Rows
    model: nn.Module
    """What a microbatch runs."""
    beside: Sequence[nn.Module] = ()
    """Models of other stages, which stay in memory."""
    run: Callable[[Sequence[Any]], Totals]
    """One microbatch."""
    update: Callable[[Totals], object]
    """What follows the last one."""
    optimizers: Sequence[torch.optim.Optimizer]
    """Optimizers whose state is in memory."""
    boundaries: Mapping[str, nn.Module]
    """What cuts the step into phases."""
    tokens_multiple: int = 1
    """Sequences are cut into so many chunks of one length."""
    fall_back: Callable[[], str] | None = None
    """What a run does where not even one row fits; says what that is."""
    gradients_of: Sequence[nn.Module] = ()
    """Models whose gradients another stage has left in memory."""

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.settings)

    def record(self, rows: int, tokens: int, *, counting: bool = False) -> Recording:
        """What one step allocates, beginning with what is resident; `counting`: what its kernels do, too."""
        recorder = Recorder(CUDA_WORKSPACES if self.on_gpu else {}, WorkCounter() if counting else None)
        gc.collect()
        with self.device.fakes, recorder, self.device.stand_in:
            recorder.count(self._resident(()))
            weights = recorder.events
            recorder.count(self._resident(self.optimizers))
            resident = {"weights": weights, "optimizer state": recorder.events}
            recorder.count(self._gradients_left())
            with measuring_phases(_EventMeter(recorder), self.model, self.boundaries) as meter:
                totals = self._run_microbatches(rows, tokens)
                meter.begin_update()
                self.update(totals)
                meter.end_phase()
        return recorder.recording(resident | meter.peaks)

    @property
    def least_bytes(self) -> int:
        """What is on the device when weights are updated, whatever the size of a microbatch."""
        resident = [plain for tensor in self._resident(self.optimizers) for plain in plain_tensors(tensor)]
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in resident}
        return sum(storages.values()) + sum(self._gradient_bytes())

    def _gradient_bytes(self) -> Iterable[int]:
        """Sizes of the gradients that are on the device together."""
        if self.settings.optimizer_in_bwd:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.device == self.device.counts:
                yield from (plain.nbytes for plain in plain_tensors(parameter))

    @property
    def host_bytes(self) -> int:
        """What is offloaded to the host between two steps, gradients included."""
        parameters = (parameter for model in (self.model, *self.beside) for parameter in model.parameters())
        gradients = [parameter for parameter in parameters if parameter.requires_grad]
        plain = [each for tensor in [*self._kept(self.optimizers), *gradients] for each in plain_tensors(tensor)]
        return sum(each.untyped_storage().nbytes() for each in plain if each.device != self.device.counts)

    def _resident(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        """What is on the device between two steps."""
        return [tensor for tensor in self._kept(optimizers) if tensor.device == self.device.counts]

    def _kept(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        beside = [tensor for model in self.beside for tensor in resident_tensors(model, ())]
        return [*beside, *resident_tensors(self.model, optimizers)]

    def most_tokens(self, unbounded: int) -> int:
        """The longest row that the model takes, counted in the tokens that are asked about."""
        return int(getattr(self.model, "max_seq_len", unbounded + self.rows.answer_tokens)) - self.rows.answer_tokens

    def _gradients_left(self) -> list[Tensor]:
        """Gradients of another stage; the update takes them along."""
        for model in self.gradients_of:
            give_gradients(model)
        return [
            parameter.grad
            for model in self.gradients_of
            for parameter in model.parameters()
            if parameter.grad is not None
        ]

    def _run_microbatches(self, rows: int, tokens: int) -> Totals:
        """One microbatch; where a step accumulates gradients, one of the smallest before it, which leaves some."""
        sample = self.rows.sample_of(tokens)
        if not self.rows.accumulates:
            return self.run([sample] * rows)
        # eager where all else is compiled: a program of its own for this size would take longer than all others
        with torch.compiler.set_stance("force_eager"):
            totals = self.run([self.rows.stand_in(sample)])
        return totals.plus(self.run([sample] * rows))

    def run_first(self) -> None:
        """Brings everything to where it is in training: optimizer state, FSDP's streams, sharding propagation."""
        with self.device.in_use(), torch.compiler.set_stance("force_eager"):
            self.device.stand_in.calibrate()
            self._gradients_left()
            self._step(rows=1, tokens=16)

    def compile_update(self) -> None:
        """Prepares an optimizer that compiles what it does to each parameter."""
        with self.device.in_use():
            states = [each.state.values() for each in self.optimizers]
            fake_tables((value for state in states for values in state for value in values.values()), self.device.fakes)
            self._step(rows=1, tokens=16)

    def compile_for(self, rows: int, tokens: int) -> None:
        """Compiles anew, for any size, but as is best for this one: the order in which gradients are computed, say.

        Dynamo makes sizes variable where it meets a second one; the first is small, and other in both.
        """
        torch.compiler.reset()
        with self.device.in_use():
            self._step(rows + 1, tokens=16)
            self._step(rows, tokens)

    def _step(self, rows: int, tokens: int) -> None:
        self.update(self._run_microbatches(rows, tokens))


@dataclass(frozen=True)
class Built:
    """What all stages share."""

    settings: Settings
    model: nn.Module
    """The model that is trained."""
    optimization: Optimization
    device: FakeDevice

    @property
    def batches_go_to(self) -> torch.device:
        return UPLOAD if on_gpu(self.settings) else HOST


def resharding(model: nn.Module, run: Callable[[Sequence[T]], Totals]) -> Callable[[Sequence[T]], Totals]:
    """What a runner sees to after a pass that has no backward."""

    def run_and_reshard(samples: Sequence[T]) -> Totals:
        totals = run(samples)
        if isinstance(model, fsdp.FSDPModule):
            fsdp.settle(model)
        return totals

    return run_and_reshard


class _EventMeter:
    """Counts events in place of bytes, so that the peak of a phase is where it ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def peak_bytes(self) -> int:
        return self._recorder.events

    def reset_peak(self) -> None:
        pass
