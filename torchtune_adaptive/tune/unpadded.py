"""Microbatches without padding: samples one after another in one row, each of which attention sees alone.

torchtune's decoder hands its mask on untouched, and its attention asks only whether there is one, then calls a function
that is an attribute of the instance. So a mask can say where samples end, and only that attribute is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.varlen import varlen_attn
from torchtune import utils
from torchtune.modules import MultiHeadAttention, TransformerDecoder
from torchtune.modules.attention_utils import _sdpa_or_flex_attention

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.fsdp import settle
from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.errors import ConfigError

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
"""A model's arguments: the rows of a microbatch, and what belongs to them."""

FLASH_ATTENTION_2 = (8, 0)
"""Compute capability: Ampere."""
WIDEST_HEAD = 256
"""The limit of flash attention on a GPU."""
TRIED_SAMPLE, TRIED_OTHERS = (1, 2, 3), ((4,), (5, 6))
"""A sample and its neighbours; their tokens are in every vocabulary."""


class Documents(NamedTuple):
    """Where the samples of a row end: the mask of torchtune's decoder. A NamedTuple, because FSDP, activation
    checkpointing and torch.compile look for tensors inside of those."""

    ends: Tensor
    """int32, on the model's device; a 0 before the first."""
    longest: int


def joined(samples: Sequence[dict[str, Any]], ignored: int) -> Batch:
    """A collate function: the samples one after another; positions begin anew with each. Its first label is ignored:
    labels are shifted by one afterwards, and it would be what the last token of the sample before has to predict."""
    lengths = [len(sample["tokens"]) for sample in samples]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    tokens, labels = (
        torch.cat([torch.as_tensor(sample[key], dtype=torch.int64) for sample in samples])
        for key in ("tokens", "labels")
    )
    labels[ends[:-1]] = ignored
    return {
        "tokens": tokens[None],
        "labels": labels[None],
        "input_pos": torch.cat([torch.arange(length) for length in lengths])[None],
        "mask": Documents(ends, max(lengths)),
    }


def batch_to_device(batch: Batch, device: torch.device) -> None:
    """torchtune's function, which knows only its own masks."""
    documents = batch.pop("mask") if isinstance(batch.get("mask"), Documents) else None
    utils.batch_to_device(batch, device)
    if documents is not None:
        batch["mask"] = documents._replace(ends=documents.ends.to(device))


def targets_of(batch: Batch, labels: Tensor, ignored: int) -> Tensor | None:
    """Positions in the row whose label counts, or the first if none does; None where rows are padded."""
    if not isinstance(batch.get("mask"), Documents):
        return None
    positions = labels[0].ne(ignored).nonzero()[:, 0]
    # the kernels of a layer have not been tried with no token at all
    return positions if len(positions) else positions.new_zeros(1)


@contextmanager
def taking_long_rows(model: nn.Module, batch: Batch) -> Iterator[None]:
    """While open, the model takes a row of any length if each sample in it is short enough: torchtune compares
    `max_seq_len`, which limits positions, with the row."""
    most: Any = getattr(model, "max_seq_len", None)
    if most is None or not isinstance(batch.get("mask"), Documents):
        yield
        return
    model.max_seq_len = max(most, int(batch["tokens"].size(1)))
    try:
        yield
    finally:
        model.max_seq_len = most


class EachAlone:
    """torchtune's attention; with `Documents` as its mask, each sample of the row sees itself alone."""

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self.stock = stock

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool) -> Tensor:
        if isinstance(mask, Documents):
            assert not dropout_p, "the kernels drop nothing: such a model has padded rows"
            return attend_each(q, k, v, mask)
        return self.stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)


def take_documents(model: nn.Module) -> None:
    """Teaches `Documents` to every attention of torchtune's, before it is compiled; one that was replaced stays so."""
    # torchtune makes the function anew for each module, of the same code
    stock = _sdpa_or_flex_attention().__code__
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and getattr(module._attention_call, "__code__", None) is stock:
            module._attention_call = EachAlone(module._attention_call)


# Causal attention within each sample of a row, by flash kernels. Where samples end is data and no shape, so one
# compiled graph serves all microbatches. A loop over `scaled_dot_product_attention` would be unrolled and compiled anew
# for each; flex attention is compiled for each length, or needs a mask of tokens².

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_each(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention over one row, [1, heads, tokens, width] as torchtune hands it over; so is the result."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends, longest = documents
    if query.device.type == "cuda":
        attended: Any = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0))  # causal
    else:
        attended, _ = torch.ops.torchtune_adaptive.attend_each(query, key, value, ends)
    in_row: Tensor = attended.transpose(0, 1)[None]
    return in_row


@torch.library.custom_op("torchtune_adaptive::attend_each", mutates_args=(), device_types="cpu")
def _attend_each(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, heads, width] each; also the logarithms of all softmaxes' sums, for the backward."""
    attended, logsumexp = _fake_attend_each(query, key, value, ends)
    for *parts, whole, of_all in _by_sample(ends, query, key, value, attended, logsumexp):
        part, of_softmax = _flash(*parts, 0.0, True)
        whole.copy_(part)
        of_all.copy_(of_softmax)
    return attended, logsumexp


@_attend_each.register_fake
def _fake_attend_each(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _buffer_like(query), query.new_empty(query.shape[:2], dtype=precision)


@torch.library.custom_op("torchtune_adaptive::attend_each_backward", mutates_args=(), device_types="cpu")
def _attend_each_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, logsumexp: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (_buffer_like(query), _buffer_like(key), _buffer_like(value))
    rows = (gradient, query, key, value, attended, logsumexp, *gradients)
    for *parts, of_query, of_key, of_value in _by_sample(ends, *rows):
        for whole, part in zip((of_query, of_key, of_value), _flash_backward(*parts, 0.0, True), strict=True):
            whole.copy_(part)
    return gradients


@_attend_each_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, logsumexp: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _buffer_like(query), _buffer_like(key), _buffer_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    *sides, ends = inputs
    ctx.save_for_backward(*sides, *output, ends)


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return (*torch.ops.torchtune_adaptive.attend_each_backward(gradient, *ctx.saved_tensors), None)


_attend_each.register_autograd(_backward, setup_context=_keep)


def _buffer_like(tensor: Tensor) -> Tensor:
    """One buffer for all samples, in the order of tokens, whatever the order of the tensor is."""
    return tensor.new_empty(tensor.shape)


def _by_sample(ends: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts [tokens, heads, width] into samples, as torch's kernel takes them: [1, heads, tokens, width]. All at once:
    views made one by one take time that shows."""
    lengths = ends.diff().tolist()
    return zip(*(row.transpose(0, 1)[None].split(lengths, dim=2) for row in rows), strict=True)


def is_padded(
    model: nn.Module, settings: Settings, device: torch.device, *, packed: bool, run_model: bool = False
) -> bool:
    """Whether rows are padded, as `adaptive.padding` says; logs why, or raises, where they have to be. Collective with
    `run_model`, for a model that has its weights: a row of several samples goes through it."""
    if settings.adaptive.token_budget is None or settings.adaptive.padding:
        return True
    reason = next(_obstacles(model, settings, device, packed=packed), None)
    if run_model:  # one rank's card may be another
        reason = next(filter(None, from_all_ranks(reason)), None) or _mixing(model, device)
    if reason is None:
        return False
    if settings.adaptive.padding is False:
        raise ConfigError(f"adaptive.padding is False, but {reason}: set adaptive.padding to null or True")
    if rank() == 0 and not packed:  # of packed rows, the token budget says what becomes of them
        logger.info("token budget · samples are padded: %s", reason)
    return True


def _obstacles(model: nn.Module, settings: Settings, device: torch.device, *, packed: bool) -> Iterator[str]:
    if packed:
        yield "the dataset is packed"
    if settings.collate_fn != type(settings).collate_fn:
        yield f"collate_fn is {settings.collate_fn}, which decides how samples share a microbatch"
    if settings.tensor_parallel_dim > 1:
        yield f"tensor_parallel_dim is {settings.tensor_parallel_dim}"
    if not isinstance(model, TransformerDecoder):
        yield f"the model is a {_name(model)}, which takes more than text"
        return
    for attention in (getattr(layer, "attn", None) for layer in model.layers):
        if not isinstance(attention, MultiHeadAttention):
            yield f"{_name(attention)} is not torchtune's attention, which can keep the samples of a row apart"
            return
        if not isinstance(attention._attention_call, EachAlone):
            yield f"the model's attention was replaced by {_name(attention._attention_call)}"
        if "forward" in vars(attention) or type(attention).forward is not MultiHeadAttention.forward:
            yield f"{_name(attention)} overrides forward"
        if attention.attn_dropout:
            yield f"the model has attention dropout ({attention.attn_dropout})"
        if not attention.is_causal:
            yield "the model's attention is not causal"
        if device.type == "cuda" and attention.head_dim > WIDEST_HEAD:
            yield f"heads are {attention.head_dim} wide, but flash attention supports at most {WIDEST_HEAD}"
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        yield f"there is no attention kernel for variable lengths on {'hip' if torch.version.hip else device.type}"
    elif settings.dtype == "fp32":
        yield "dtype is fp32, which flash attention on a GPU does not support"
    # a rehearsal is on a card that is not there
    elif torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < FLASH_ATTENTION_2:
        yield f"{torch.cuda.get_device_name(device)} (compute capability {capability}) has no flash attention"


def _name(thing: object) -> str:
    """Its name without FSDP's prefix for the classes that it makes."""
    return str(getattr(thing, "__name__", type(thing).__name__.removeprefix("FSDP")))


def _mixing(model: nn.Module, device: torch.device) -> str | None:
    """Collective: tries whether the logits of a sample depend on the others in its row. A hook that shifts tokens, or
    positions counted by place in the row, cannot be seen, and such a model would silently learn something else."""
    (alone,) = _logits(model, device, [TRIED_SAMPLE])
    row = [TRIED_SAMPLE, TRIED_OTHERS[0], TRIED_SAMPLE, TRIED_OTHERS[1], TRIED_SAMPLE]
    apart = torch.stack([(logits - alone).norm(dim=-1) for logits in _logits(model, device, row)[::2]])
    most = max(from_all_ranks(float((apart / alone.norm(dim=-1).clamp_min(1e-30)).max())))
    rounding = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if most <= rounding:
        return None
    return (
        f"the model's output for a sample depends on the other samples in its row (logits differ by {most:.1%}), so "
        "one of its modules mixes them"
    )


def _logits(model: nn.Module, device: torch.device, row: Sequence[Sequence[int]]) -> list[Tensor]:
    """Collective: the logits of each sample of a row, without dropout, gradients or compilation."""
    batch = joined([{"tokens": list(tokens), "labels": list(tokens)} for tokens in row], ignored=-100)
    del batch["labels"]
    batch_to_device(batch, device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), taking_long_rows(model, batch):
            logits = model(**batch)
    finally:
        for module in training:
            module.training = True
        if isinstance(model, FSDPModule):
            settle(model)
    of_row = logits[0] if isinstance(logits, Tensor) else torch.cat(list(logits), dim=1)[0]
    return list(of_row.float().split([len(tokens) for tokens in row]))
