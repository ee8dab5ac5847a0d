"""Compiled layers on tensors without data, beside the same layers really compiled for this CPU and run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.recipes.metering import profiled
from torchtune_adaptive.errors import PredictionError
from torchtune_adaptive.prediction.compilation import KNOWN_VERSIONS, without_kernels
from torchtune_adaptive.prediction.recorder import Recorder

CPU = torch.device("cpu")
ROWS, TOKENS, WIDTH = 3, 80, 64


class Layer(nn.Module):
    """What layers of transformers consist of; `frozen` as under LoRA, where only small matrices are trained."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.requires_grad_(not frozen)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        heads = self.qkv(normed).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(*heads, is_causal=True)
        h = x + attention.transpose(1, 2).reshape(x.shape) + self.b(self.a(normed))
        return h + self.down(functional.silu(self.gate(h)) * self.up(h))


def warm_layer(*, frozen: bool) -> tuple[Layer, Tensor]:
    layer, x = Layer(frozen=frozen), torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    layer.compile()
    layer(x).backward(torch.ones_like(x))
    layer.zero_grad()
    x.grad = None
    return layer, x


def measured(*, frozen: bool) -> tuple[int, int, int]:
    torch._dynamo.reset()
    layer, x = warm_layer(frozen=frozen)
    after_forward, forward_peak = profiled(lambda: layer(x))
    gradient = torch.ones_like(x)
    _, peak = profiled(lambda: layer(x).backward(gradient))
    return after_forward, forward_peak, peak


def predicted(*, frozen: bool, as_on_gpu: bool = False) -> tuple[int, int, int]:
    with without_kernels(CPU, as_on_gpu=as_on_gpu), FakeTensorMode():
        layer, x = warm_layer(frozen=frozen)
        gradient = torch.ones_like(x)
        with Recorder({}) as recorder:
            out = layer(x)
            after_forward, forward_peak = recorder.live_bytes, recorder.peak_bytes
            out.backward(gradient)
            del out
    return after_forward, forward_peak, recorder.peak_bytes


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_layer_keeps_what_was_predicted_and_peaks_there(frozen: bool) -> None:
    assert predicted(frozen=frozen) == measured(frozen=frozen)


def test_nothing_is_compiled_and_nothing_left_behind() -> None:
    with mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", side_effect=AssertionError("a C++ compiler")):
        eager = async_compile.AsyncCompile.cpp_pybinding
        assert all(predicted(frozen=False))
        assert async_compile.AsyncCompile.cpp_pybinding is eager
    with FakeTensorMode(), Recorder({}) as recorder:
        assert recorder.live_bytes == 0


def test_a_gpu_computes_again_what_a_cpu_keeps() -> None:
    """A sigmoid that two sums read, in different directions."""

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate = torch.sigmoid(x)
            return gate.sum(0) + gate.sum(1)

    def peak(*, as_on_gpu: bool) -> int:
        with without_kernels(CPU, as_on_gpu=as_on_gpu), FakeTensorMode(), torch.no_grad():
            module, x = Gated(), torch.empty(64, 64)
            module.compile()
            with Recorder({}) as recorder:
                module(x)
            return recorder.peak_bytes

    assert peak(as_on_gpu=True) < peak(as_on_gpu=False)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cu130", "3.11.0"])
def test_a_torch_that_is_not_known_is_refused(version: str) -> None:
    message = rf"insides of torch 2.11, 2.12, 2.13, and this is {version.replace('+', '.')}; measure on the device"
    with mock.patch.object(torch, "__version__", version), pytest.raises(PredictionError, match=message):
        without_kernels(CPU, as_on_gpu=True).__enter__()


def test_a_name_that_torch_no_longer_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    with pytest.raises(PredictionError, match="lacks _empty_strided_cpu"):
        without_kernels(CPU, as_on_gpu=True).__enter__()


def test_the_torch_that_is_installed_is_known() -> None:
    assert tuple(map(int, torch.__version__.split(".")[:2])) in KNOWN_VERSIONS


def of_three_sizes(function: Callable[[Tensor], Tensor]) -> None:
    with without_kernels(CPU, as_on_gpu=True), torch._dynamo.config.patch(recompile_limit=1), FakeTensorMode():
        for size in (2, 3, 4):
            function(torch.empty(size))


def test_what_would_quietly_be_eager_is_said_in_one_message() -> None:
    with pytest.raises(PredictionError, match=r"cannot be predicted .*recompile_limit.*; measure on the device"):
        of_three_sizes(torch.compile(lambda x: x * x.shape[0], dynamic=False))
