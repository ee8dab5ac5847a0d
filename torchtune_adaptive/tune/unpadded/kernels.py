"""Causal attention within each sample of a row: the flash kernels, on a GPU and on a CPU.

Where samples end is data and no shape, so one compiled graph serves all microbatches. A loop over calls of
`scaled_dot_product_attention` would be unrolled, and compiled anew for each; flex attention is compiled for each
length, or needs a mask of tokens².
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

WIDEST_HEAD = 256
"""What the GPU's kernel takes."""

CAUSAL = (-1, 0)
"""The window of each token: all tokens before it, none after it."""


def attend_each(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Attention over one row, [1, heads, tokens, width] as torchtune hands it over; the result is alike."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if is_on_gpu(query):
        each = _on_gpu(query, key, value, ends, longest)
    else:
        each = torch.ops.torchtune_adaptive.attend_each(query, key, value, ends)[0]
    return each.transpose(0, 1)[None]


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _on_gpu(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """torch's own kernel for samples of various lengths: [tokens, heads, width] each."""
    return cast(Tensor, varlen_attn(query, key, value, ends, ends, longest, longest, window_size=CAUSAL))


@torch.library.custom_op("torchtune_adaptive::attend_each", mutates_args=(), device_types="cpu")
def _attend_each(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, heads, width] each; also what the backward needs to know of every softmax."""
    attended, logsumexp = _like(query), _logsumexp_like(query)
    sides = (query, key, value, attended, logsumexp)
    for *parts, whole, of_all in _samples(ends, *sides):
        part, of_softmax = _flash(*parts, 0.0, True)
        whole.copy_(part)
        of_all.copy_(of_softmax)
    return attended, logsumexp


@_attend_each.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return _like(query), _logsumexp_like(query)


@torch.library.custom_op("torchtune_adaptive::attend_each_backward", mutates_args=(), device_types="cpu")
def _attend_each_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, logsumexp: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (_like(query), _like(key), _like(value))
    sides = (gradient, query, key, value, attended, logsumexp, *gradients)
    for *parts, of_query, of_key, of_value in _samples(ends, *sides):
        found = _flash_backward(*parts, 0.0, True)
        of_query.copy_(found[0])
        of_key.copy_(found[1])
        of_value.copy_(found[2])
    return gradients


@_attend_each_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, logsumexp: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query), _like(key), _like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    *sides, ends = inputs
    ctx.save_for_backward(*sides, *output, ends)


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return (*torch.ops.torchtune_adaptive.attend_each_backward(gradient, *ctx.saved_tensors), None)


_attend_each.register_autograd(_backward, setup_context=_keep)


def _like(tensor: Tensor) -> Tensor:
    """One buffer for all samples, in the order of tokens, whatever the order of the tensor is."""
    return tensor.new_empty(tensor.shape)


def _samples(ends: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What each sample has of [tokens, heads, width], as torch's kernel takes it: [1, heads, tokens, width].

    All cut at once: beside the kernel of a short sample, views made one by one take time that shows.
    """
    lengths = ends.diff().tolist()
    return zip(*(row.transpose(0, 1)[None].split(lengths, dim=2) for row in rows), strict=True)


def _logsumexp_like(query: Tensor) -> Tensor:
    """[tokens, heads]"""
    return query.new_empty(query.shape[:2], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
