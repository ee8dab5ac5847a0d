"""Fake tensors on a CPU, made to allocate what a GPU would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.errors import PredictionError
from torchtune_adaptive.prediction.recorder import NO_OP, Recorder
from torchtune_adaptive.prediction.shims import HOST, META, UPLOAD, DeviceStandIn, cuda_kernels, flash_backward_bytes


class Ops(TorchDispatchMode):
    """The names of all operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_in(*, host_is_device: bool = False) -> Iterator[Ops]:
    mode = DeviceStandIn(host_is_device=host_is_device)
    with FakeTensorMode(allow_non_fake_inputs=True), Ops() as ops, mode:
        mode.calibrate()
        ops.names.clear()
        yield ops


def test_a_torch_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    named = r"predictions do not support torch .* \(torch._C has no _current_autograd_node\)"
    with pytest.raises(PredictionError, match=named), stand_in():
        pass


def attention_ops(dtype: torch.dtype, mask: Callable[[], Tensor | None]) -> list[str]:
    with stand_in() as ops, cuda_kernels():
        query, key, value = (torch.empty(2, 4, 64, 32, dtype=dtype, requires_grad=True) for _ in range(3))
        functional.scaled_dot_product_attention(query, key, value, mask(), is_causal=mask() is None).sum().backward()
        return [name for name in ops.names if "attention" in name or name in ("softmax", "_softmax", "bmm", "matmul")]


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, lambda: None, "flash"),
        (torch.float32, lambda: None, "efficient"),
        (torch.bfloat16, lambda: torch.ones(2, 1, 64, 64, dtype=torch.bool), "efficient"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(dtype, mask, kernel: str) -> None:
    """And no other: the products of the math kernel would be counted in full, tokens × tokens."""
    name = f"_scaled_dot_product_{kernel}_attention"
    assert attention_ops(dtype, mask) == [name, f"{name}_backward"]


def step_ops(model: nn.Module, optimizer: type[torch.optim.Optimizer], **options: bool) -> set[str]:
    with stand_in() as ops, cuda_kernels():
        fake = model()
        step = optimizer(fake.parameters(), lr=0.1, **options)
        fake(torch.empty(3, 8)).sum().backward()
        nn.utils.clip_grad_norm_(fake.parameters(), 1.0)
        ops.names.clear()
        step.step()
        return set(ops.names)


def test_an_optimizer_left_to_choose_takes_the_kernels_that_it_takes_on_cuda() -> None:
    names = step_ops(lambda: nn.Linear(8, 8), torch.optim.AdamW)
    assert {name for name in names if name.startswith("_foreach")} >= {"_foreach_lerp_", "_foreach_addcdiv_"}
    assert not names & {"lerp_", "addcdiv_"}


def test_an_optimizer_that_was_told_keeps_to_it() -> None:
    assert "_fused_adamw_" in step_ops(lambda: nn.Linear(8, 8), torch.optim.AdamW, fused=True)
    assert "addcdiv_" in step_ops(lambda: nn.Linear(8, 8), torch.optim.AdamW, foreach=False)


def test_everything_is_put_back() -> None:
    before = functional.scaled_dot_product_attention
    with cuda_kernels():
        assert functional.scaled_dot_product_attention is not before
    assert functional.scaled_dot_product_attention is before


def added_up(program: Callable[[Tensor], Tensor]) -> int:
    """Times that autograd allocates to add gradients up."""
    with stand_in() as ops:
        loss = program(torch.empty(4, 4, requires_grad=True) * 2)
        ops.names.clear()
        loss.backward()
        return ops.names.count("add")


def test_gradients_of_one_owner_are_added_in_place() -> None:
    assert added_up(lambda x: x.sin().sum() + x.cos().sum() + x.exp().sum()) == 0


class Keeping(torch.autograd.Function):
    """Holds on to the gradient that it returns."""

    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Keeping.kept.append(gradient * 2)
        return Keeping.kept[-1]


def test_gradients_that_someone_else_holds_are_added_out_of_place() -> None:
    try:
        assert added_up(lambda x: x.cos().sum() + Keeping.apply(x).sum()) == 1
    finally:
        Keeping.kept.clear()


def test_what_is_on_the_host_is_computed_and_what_is_read_from_the_device_is_one() -> None:
    labels = torch.tensor([3, -100, 4])
    with stand_in():
        assert int(labels.ne(-100).sum()) == 2
        assert torch.empty(5).sum().item() == 1.0
        assert bool(torch.empty(5).isnan().any()) is True


@pytest.mark.parametrize("host_is_device", [False, True])
def test_only_what_is_on_the_device_is_recorded(host_is_device: bool) -> None:
    recorder = Recorder({})
    mode = DeviceStandIn(host_is_device=host_is_device)
    labels = torch.ones(1000, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, mode:
        copy = labels + 1
        on_device = copy.to(UPLOAD)
        assert isinstance(on_device, FakeTensor)
        assert recorder.live_bytes == (16000 if host_is_device else 8000)


def test_what_is_offloaded_is_recorded_while_it_is_on_the_device() -> None:
    recorder = Recorder({})
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(1000)
        with recorder, DeviceStandIn(host_is_device=False, offloads=True):
            moment = torch.zeros_like(weight).add_(weight * 2)
            assert recorder.live_bytes == 0
            gathered = weight.to(UPLOAD)
            assert recorder.live_bytes == 4000
            gradient = (gathered * 2).to(HOST)
            del gathered
            moment.add_(gradient)
            assert (recorder.live_bytes, recorder.peak_bytes) == (0, 8000)


def test_what_is_offloaded_may_be_mixed_with_real_batches() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceStandIn(host_is_device=False, offloads=True):
        tokens = torch.tensor([[1, 2, 3]]).to(UPLOAD)
        assert torch.empty(10, 4).to(UPLOAD)[tokens].device == UPLOAD


def test_what_is_on_meta_needs_no_fakes_until_it_gets_memory() -> None:
    with stand_in() as ops:
        weight = torch.empty(4096, 2, device=META)
        shards = weight.chunk(1024)
        assert not any(isinstance(each, FakeTensor) for each in (weight, *shards))
        assert ops.names == []
        assert isinstance(torch.empty_like(shards[0], device=HOST), FakeTensor)


def test_a_recording_has_every_block_with_its_operation() -> None:
    recorder = Recorder({torch.ops.aten.mul.Tensor: lambda a, b: 77})
    with FakeTensorMode(), recorder:
        first = torch.empty(100)
        second = first * 2.0
        del first
        second.untyped_storage().resize_(800)
    recording = recorder.recording({})
    assert [(block.op, change) for block, change in labelled(recording)] == [
        ("aten.empty.memory_format", 400),
        ("aten.mul.Tensor", 400),
        ("aten.mul.Tensor", 77),
        ("aten.mul.Tensor", -77),
        ("aten.empty.memory_format", -400),
        ("aten.mul.Tensor", -400),
        (NO_OP, 800),
    ]


def labelled(recording):
    return [
        (recording.blocks[at], change) for at, change in zip(recording.of_block, recording.bytes_change, strict=True)
    ]


def test_blocks_keep_the_stream_that_they_were_made_on() -> None:
    recorder = Recorder({})
    with FakeTensorMode(), recorder:
        kept = [torch.empty(1)]
        with torch.cpu.stream(torch.cpu.Stream()):
            kept.append(torch.empty(1))
        kept.append(torch.empty(1))
    assert [block.stream for block in recorder.recording({}).blocks] == [0, 1, 0]


def test_flash_attention_adds_gradients_up_in_whole_tiles() -> None:
    query = torch.empty(2, 8, 100, 64, device="meta")
    assert flash_backward_bytes(query, query) == 4 * 2 * 8 * 128 * (64 + 1)
