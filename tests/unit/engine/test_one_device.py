"""Searches on one device: results, what probes measure, errors, and the state that a search restores."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.searched_model import (
    Shape,
    Trained,
    measured_peaks,
    search_within,
    state_of,
)
from tests.simulated_memory import FakeMemory
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.probes import (
    PhaseMeter,
    ProbeReport,
    TrainingStep,
    agreed_peak,
    find_max_batch_size,
    phase_names,
)
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import ONE_ROW_REMEDIES, STRATEGIES, Budget, Peak
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, UnrecoverableError, without_backward
from torchtune_adaptive.formatting import parse_size

SIZES = range(1, 25)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("short_of", ["one row", "the update", "the weights"])
def test_one_row_that_does_not_fit_is_an_error_with_all_numbers(strategy: str, short_of: str):
    with MemoryMeter() as meter:
        trained = Trained(Shape(length=64 if short_of == "one row" else 4))
        need = measured_peaks(trained, meter, [1])[0][0]
        cap = meter.live_bytes - 1 if short_of == "the weights" else need - 1

        trained.runner.trains = short_of != "the weights"
        with pytest.raises(OneRowDoesNotFitError, match=f"{trained.shape.length} tokens .* rank 0") as raised:
            search_within(trained.step(), meter, cap, strategy=strategy, max_rows=8)
    told = re.findall(r"(?:needs|budget is) ([\d.]+ \w+)", raised.value.fact)
    assert [parse_size(each, "").amount for each in told] == pytest.approx([need, cap], abs=200)
    remedies = ONE_ROW_REMEDIES if trained.runner.trains else without_backward(ONE_ROW_REMEDIES)
    assert raised.value.remedies == remedies


@pytest.mark.parametrize(
    ("cap_bytes", "message"), [(1_000_000, "with meter"), (None, "to search within; set cap_bytes of MemoryMeter")]
)
def test_search_without_a_budget_is_refused(cap_bytes: int | None, message: str):
    with pytest.raises((ValueError, ConfigError), match=message):
        find_max_batch_size(Trained(Shape()).step(), memory=MemoryMeter(cap_bytes))


def test_existing_gradients_are_refused_and_kept():
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        trained.forward_backward([trained.sample])
        gradients = [parameter.grad.clone() for parameter in trained.model.parameters()]
        with pytest.raises(ValueError, match="zero_grad"):
            search_within(trained.step(), meter, 400_000)
        after = [parameter.grad for parameter in trained.model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(gradients, after, strict=True))


def test_error_other_than_out_of_memory_ends_the_search_and_reports_the_rows():
    class Refusing(Trained):
        def forward_backward(self, samples):
            if len(samples) > 1:
                raise RuntimeError("no kernel for this size")
            return super().forward_backward(samples)

    with MemoryMeter() as meter, pytest.raises(RuntimeError, match="no kernel") as raised:
        search_within(Refusing(Shape()).step(), meter, 400_000)
    assert raised.value.__notes__ == ["(raised while the batch size search measured a microbatch of 2 rows)"]


class CountingMemory(FakeMemory):
    """Memory whose peak is the number of its reads."""

    asked, limited = 0, True

    @property
    def peak_bytes(self) -> int:
        self.asked += 1
        return self.asked

    @peak_bytes.setter
    def peak_bytes(self, _: int) -> None: ...

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        self.limited = False
        yield
        self.limited = True


def test_small_probes_and_the_update_are_measured_without_the_limit():
    memory = CountingMemory(budget_bytes=1_000_000)
    limited: list[tuple[int, bool]] = []

    class Watched(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            limited.append((len(samples), memory.limited))
            return super().forward_backward(samples)

        def update(self, result: Any) -> None:
            assert not memory.limited
            super().update(result)

    find_max_batch_size(Watched(Shape()).step(), memory=memory, max_rows=4, strategy="binary")
    assert limited[1:] == [(1, False), (1, False), (1, False), (2, False), (1, True), (4, True)]


def test_retries_during_a_probe_count_as_its_own_and_reject_it():
    memory = CountingMemory(budget_bytes=1_000_000)
    memory.retries = 7

    class Retried(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            memory.retries += len(samples) > 2
            return super().forward_backward(samples)

    result = find_max_batch_size(Retried(Shape()).step(), memory=memory, max_rows=8, strategy="binary")
    assert result.rows == 2
    assert [probe.peak.retries for probe in result.probes] == [0, 0, 1]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.norm(self.layer(y)), x, use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_phases_end_at_the_boundaries_even_with_checkpointing(microbatches: int):
    model = Checkpointed()
    boundaries = {"layer": model.layer, "head": model.head}
    memory = CountingMemory(budget_bytes=1_000_000)
    with PhaseMeter(memory, model, boundaries) as meter:
        for _ in range(microbatches):
            model(torch.ones(2, 4)).sum().backward()
        meter.begin(len(phase_names(boundaries)) - 1)
        meter.end()
    assert phase_names(boundaries) == [
        "layer forward",
        "head forward",
        "loss",
        "head backward",
        "layer backward",
        "update",
    ]
    assert sorted(meter.peaks, key=meter.peaks.__getitem__) == phase_names(boundaries)
    model(torch.ones(2, 4)).sum().backward()
    assert memory.asked == 1 + 6 + 5 * (microbatches - 1)  # the hooks are gone


def report(
    budget: int, resident: int, *peaks: int, retries: int = 0, seconds: float = 1.0, fullness: float = 0.0
) -> ProbeReport:
    return ProbeReport(Budget(budget, resident), retries, seconds, peaks, fullness)


def test_ranks_agree_on_the_largest_share_of_memory_per_phase():
    reports = [report(100, 10, 30, 50, 0, retries=1, fullness=0.5), report(100, 10, 40, 20, 0, seconds=3.0)]
    agreed = agreed_peak(["a", "b", "reached by none"], reports)
    assert agreed == Peak({"a": 40, "b": 50}, fits=True, retries=1, seconds=3.0, fullness=0.5)
    unequal = [report(110, 10, 20), report(210, 10, 160)]
    assert agreed_peak(["a"], unequal).phase_bytes["a"] == 10 + 75


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, not foreach": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, together": (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "foreach": None}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW, learning rate in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Rprop, sign-based": (torch.optim.Rprop, {}),
}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_search_restores_everything_bitwise(kind: str, resumed: bool):
    optimizer, options = OPTIMIZERS[kind]
    with MemoryMeter() as meter:
        trained = Trained(Shape(), optimizer, options)
        for parameter in trained.model.parameters():
            parameter.data.view(-1)[::3] = -0.0
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


@pytest.mark.parametrize(
    ("bad", "error"),
    [("NaN", None), ("update fails", UnrecoverableError), ("too little memory", OneRowDoesNotFitError)],
)
def test_search_with_bad_gradients_or_without_a_result_restores_everything(bad: str, error: type[Exception] | None):
    def update(result: Any) -> None:
        if bad == "NaN":
            trained.model.head.weight.grad.fill_(torch.nan)
        trained.update(result)
        if bad == "update fails":
            raise torch.OutOfMemoryError

    with MemoryMeter() as meter:
        trained = Trained(Shape())
        trained.train([2])
        before = state_of(trained)
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
        kind, recovery = self.runner.kind, Recovery(self.model, enabled=False)
        self.runner = StepRunner(self.model, self.forward_backward, limit=RowLimit(1), kind=kind, recovery=recovery)
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
