"""Reasons for padding, and when the samples of a step are dealt; one line explains each."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtune.models.gemma2 import gemma2
from torchtune.modules import MultiHeadAttention

from tests.unit.data.minimal_config import NEEDED
from tests.unit.data.models import MODELS, SIZES, build
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.data.unpadded import is_padded, support_documents

SETTINGS = Settings(**NEEDED)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
BUDGET = AdaptiveConfig(token_budget=4096)


def windowed(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError


def with_attention(change: Callable[[MultiHeadAttention], None]) -> nn.Module:
    model = build()
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            change(module)
    support_documents(model)
    return model


def own_attention() -> nn.Module:
    return with_attention(lambda each: setattr(each, "_attention_call", windowed))


def own_forward() -> nn.Module:
    return with_attention(lambda each: setattr(each, "forward", partial(MultiHeadAttention.forward, each)))


def narrow_gemma2() -> nn.Module:
    model = gemma2(**{**SIZES, "head_dim": 8, "hidden_capping_value": 30.0, "final_capping_value": 30.0})
    support_documents(model)
    return model


OBSTACLES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "the dataset is packed": (build, {}, {"packed": True}),
    "collate_fn is my.collate": (build, {"collate_fn": "my.collate"}, {}),
    "tensor_parallel_dim is 2": (build, {"tensor_parallel_dim": 2}, {}),
    "the model is a Linear, which takes more than text": (lambda: nn.Linear(1, 1), {}, {}),
    "Gemma2Attention is not torchtune's attention": (narrow_gemma2, {}, {}),
    "the model's attention was replaced by windowed": (own_attention, {}, {}),
    "MultiHeadAttention overrides forward": (own_forward, {}, {}),
    "the model has attention dropout (0.1)": (lambda: build(attn_dropout=0.1), {}, {}),
    "dtype is fp32, which flash attention on a GPU": (build, {}, {"device": GPU}),
    "there is no attention kernel for variable lengths on mps": (build, {}, {"device": torch.device("mps")}),
    "has no flash attention": (build, {"dtype": "bf16"}, {"device": GPU}),
    "heads are 512 wide, but flash attention supports at most 256": (
        lambda: build(embed_dim=512, num_heads=1, num_kv_heads=1),
        {"dtype": "bf16"},
        {"device": GPU},
    ),
}


@pytest.fixture
def modern_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some card")
    return monkeypatch


def decide(adaptive: AdaptiveConfig, model: nn.Module, settings: Settings = SETTINGS, **other: Any) -> bool:
    return is_padded(model, replace(settings, adaptive=adaptive), **{"device": CPU, "packed": False, **other})


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_to_packing_are_logged_and_rows_are_padded(
    reason: str, modern_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, changed, other = OBSTACLES[reason]
    model, settings = make(), replace(SETTINGS, **changed)
    if "no flash attention" in reason:
        modern_gpu.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with caplog.at_level(logging.INFO):
        assert decide(BUDGET, model, settings, **other)
    message = [line for line in caplog.messages if "samples are padded" in line and reason in line]
    assert len(message) == (reason != "the dataset is packed"), "for packed rows, the token budget logs a line instead"


@pytest.mark.usefixtures("modern_gpu")
def test_torchtunes_models_do_not_need_padding_on_a_gpu() -> None:
    assert not decide(BUDGET, build(), replace(SETTINGS, dtype="bf16"), device=GPU)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "adds part of the previous token": lambda states: states + 0.5 * nn.functional.pad(states, (0, 0, 1, -1)),
    "subtracts the mean of the row": lambda states: states - states.mean(dim=1, keepdim=True),
    "adds absolute positions": lambda states: states + 0.02 * torch.arange(states.size(1))[:, None],
}


@pytest.mark.parametrize("mixing", MIXING)
def test_model_that_mixes_samples_of_a_row_is_detected_by_a_trial(
    mixing: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, states: (MIXING[mixing](states[0]),))
    with caplog.at_level(logging.INFO):
        assert decide(BUDGET, model, run_model=True)
    assert "depends on the other samples in its row" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_trial_restores_the_model(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    modes = [module.training for module in model.modules()]
    assert not decide(BUDGET, model, run_model=True)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_are_padded_if_configured_or_without_a_token_budget() -> None:
    assert decide(replace(BUDGET, padding=True), build())
    assert decide(AdaptiveConfig(), build())
