"""A search restores all state."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.searched_model import Shape, Trained, search_within, state_of
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, UnrecoverableError

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, not foreach": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, together": (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "foreach": None}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW, learning rate in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Rprop, sign-based": (torch.optim.Rprop, {}),
}


def with_negative_zeros(trained: Trained) -> Trained:
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.view(-1)[::3] = -0.0
    return trained


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_search_restores_everything_bitwise(kind: str, resumed: bool):
    optimizer, options = OPTIMIZERS[kind]
    with MemoryMeter() as meter:
        trained = with_negative_zeros(Trained(Shape(), optimizer, options))
        if resumed:
            trained.train([2])
        before = state_of(trained)
        tensors = state_tensors(trained.optimizer)
        result = search_within(trained.step(), meter, 400_000, strategy="binary")
        assert result.out_of_memory_count > 0
        assert state_of(trained) == before
        assert all(now is then for now, then in zip(state_tensors(trained.optimizer), tensors, strict=True))
        assert meter.peak_bytes == meter.live_bytes


@pytest.mark.parametrize(
    ("optimizer", "trained_before", "copies"),
    [
        ("AdamW, fused", False, 0),
        ("SGD with momentum", False, 0),
        ("AdamW, fused", True, 2),
        ("Rprop, sign-based", False, 1),
    ],
)
def test_search_copies_to_the_host_only_what_it_must(
    optimizer: str, trained_before: bool, copies: int, monkeypatch: pytest.MonkeyPatch
):
    to_host, copied = snapshot._to_host, []
    monkeypatch.setattr(snapshot, "_to_host", lambda tensor: copied.append(tensor.nbytes) or to_host(tensor))
    with MemoryMeter() as meter:
        trained = Trained(Shape(), *OPTIMIZERS[optimizer])
        if trained_before:
            trained.train([2])
        search_within(trained.step(), meter, 400_000)
    weights_bytes = sum(each.nbytes for each in trained.model.parameters())
    assert abs(sum(copied) - copies * weights_bytes) < 1000, "buffers are copied, too, and zeros are not"


BAD_UPDATES = {
    "NaN": None,
    "update fails": UnrecoverableError,
    "too little memory": OneRowDoesNotFitError,
}
"""The error of each."""


@pytest.mark.parametrize("bad", BAD_UPDATES)
def test_search_with_bad_gradients_or_without_a_result_restores_everything(bad: str):
    def update(result: Any) -> None:
        if bad == "NaN":
            trained.model.head.weight.grad.fill_(torch.nan)
        trained.update(result)
        if bad == "update fails":
            raise torch.OutOfMemoryError

    with MemoryMeter() as meter:
        trained = Trained(Shape())
        trained.train([2])
        before, error = state_of(trained), BAD_UPDATES[bad]
        with pytest.raises(error) if error else nullcontext():
            search_within(
                replace(trained.step(), update=update),
                meter,
                meter.live_bytes + 1000 if bad == "too little memory" else 400_000,
            )
        assert state_of(trained) == before


class InBackward(Trained):
    """Training whose optimizers step inside the backward, as soon as a gradient is ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner = StepRunner(
            self.model,
            self.forward_backward,
            limit=RowLimit(1),
            kind=SampleKind(length_of=len, filler=lambda tokens: tokens[:2]),
            recovery=Recovery(self.model, enabled=False),
        )
        self.optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def step(self) -> TrainingStep[Tensor]:
        optimizers = list(self.optimizers.values())
        return replace(super().step(), update=lambda result: None, optimizers=optimizers, boundaries={})


def test_search_with_optimizers_in_the_backward_restores_everything():
    with MemoryMeter() as meter:
        trained = InBackward(Shape())
        before = state_of(trained)
        with pytest.raises(OneRowDoesNotFitError, match=" needs "):
            search_within(trained.step(), meter, 2 * meter.live_bytes)
        result = search_within(trained.step(), meter, 400_000)
        assert state_of(trained) == before
        assert all(not optimizer.state for optimizer in trained.optimizers.values())
    assert set(result.probes[0].peak.phase_bytes) == {"forward and backward", "update"}, "without boundaries"
    assert result.rows > 1
    assert result.out_of_memory_count == 0


@pytest.mark.parametrize("strategy", ["binary", "decrease"])
def test_strategies_that_run_out_of_memory_are_refused_if_a_step_cannot_be_repeated(strategy: str):
    with MemoryMeter() as meter, pytest.raises(ConfigError, match=strategy):
        search_within(InBackward(Shape()).step(), meter, 2_000_000, strategy=strategy)
