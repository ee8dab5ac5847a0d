"""Microbatches without padding: samples are concatenated in one row, and attention is masked per sample.

torchtune's decoder passes its mask unchanged to the attention modules, which call a function that is an attribute of
the module. So the boundaries of the samples are passed as the mask, and only that attribute is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.varlen import varlen_attn
from torchtune import utils
from torchtune.modules import MultiHeadAttention, TransformerDecoder
from torchtune.modules.attention_utils import _sdpa_or_flex_attention

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.contexts import evaluating
from torchtune_adaptive.engine.fsdp import end_pass_without_backward
from torchtune_adaptive.engine.ranks import from_all_ranks, rank

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
"""The arguments of a model for one microbatch."""

FLASH_ATTENTION_2 = (8, 0)
"""Its minimum compute capability (Ampere)."""
WIDEST_HEAD = 256
"""Largest head dimension of flash attention on a GPU."""
TEST_SAMPLE, TEST_NEIGHBOURS = (1, 2, 3), ((4,), (5, 6))
"""Tokens of a sample and of its neighbours in a row, for a test of the model. Every vocabulary contains them."""


class Documents(NamedTuple):
    """Sample boundaries of a row, passed as the mask of torchtune's decoder.

    A NamedTuple, because FSDP, activation checkpointing and torch.compile find tensors in it.
    """

    ends: Tensor
    """0, and the position after the last token of each sample; int32, on the model's device."""
    longest: int


def concatenated(samples: Sequence[dict[str, Any]], ignored: int) -> Batch:
    """Concatenate samples in one row; positions restart with every sample.

    The first label of each sample is ignored. After the shift, it would be the target of the previous sample's last
    token.
    """
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
    """Move a batch to the device. torchtune's function of this name does not support `Documents`."""
    documents = batch.pop("mask") if isinstance(batch.get("mask"), Documents) else None
    utils.batch_to_device(batch, device)
    if documents is not None:
        batch["mask"] = documents._replace(ends=documents.ends.to(device))


def targets_of(batch: Batch, labels: Tensor, ignored: int) -> Tensor | None:
    """Return the positions that have a label, or position 0 if none has; None for padded rows."""
    if not isinstance(batch.get("mask"), Documents):
        return None
    positions = labels[0].ne(ignored).nonzero()[:, 0]
    # Few layers are tested with zero tokens, so keep one.
    return positions if len(positions) else positions.new_zeros(1)


@contextmanager
def allowing_long_rows(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Raise the model's `max_seq_len` to the length of the row within the context.

    It limits the positions within a sample, but torchtune compares it with the length of the whole row.
    """
    most: Any = getattr(model, "max_seq_len", None)
    if most is None or not isinstance(batch.get("mask"), Documents):
        yield
        return
    model.max_seq_len = max(most, int(batch["tokens"].size(1)))
    try:
        yield
    finally:
        model.max_seq_len = most


class PerSampleAttention:
    """Wraps torchtune's attention function; with a `Documents` mask, tokens attend only within their sample."""

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self.stock = stock

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool) -> Tensor:
        """Compute attention with torchtune's arguments."""
        if isinstance(mask, Documents):
            assert not dropout_p, "the kernels do not support dropout; _obstacles() rejects such a model"
            return attend_each(q, k, v, mask)
        return self.stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)


def support_documents(model: nn.Module) -> None:
    """Add support for `Documents` to torchtune's attention. Call it before compilation.

    Modules whose attention function is not torchtune's stay unchanged.
    """
    # torchtune creates one function for each module; all of them have the same code object.
    stock = _sdpa_or_flex_attention().__code__
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and getattr(module._attention_call, "__code__", None) is stock:
            module._attention_call = PerSampleAttention(module._attention_call)


def attend_each(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attend within each sample of one row; inputs and output are [1, heads, tokens, width]."""
    ends, longest = documents
    if query.device.type != "cuda":
        on_cpu: Tensor = _attend_each_on_cpu(query, key, value, ends)
        return on_cpu
    # Sample boundaries are data and not shapes, so one compiled graph serves all microbatches.
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended: Any = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0))  # causal
    in_row: Tensor = attended.transpose(0, 1)[None]
    return in_row


@torch.compiler.disable(reason="the loop would be compiled again for each split of a row")  # type: ignore[untyped-decorator]
def _attend_each_on_cpu(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    lengths = ends.diff().tolist()
    by_sample = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in by_sample], dim=2)


def is_padded(
    model: nn.Module, settings: Settings, device: torch.device, *, packed: bool, run_model: bool = False
) -> bool:
    """Return True if samples are padded; if the model or the device requires padding, log the reason.

    With `run_model`, this is collective: it also tests the model, with its weights, on a row of several samples.
    """
    if settings.adaptive.token_budget is None or settings.adaptive.padding:
        return True
    reason = next(_obstacles(model, settings, device, packed=packed), None)
    if run_model:  # GPUs may differ between ranks
        reason = next(filter(None, from_all_ranks(reason)), None) or _find_dependence(model, device)
    if reason is None:
        return False
    if rank() == 0 and not packed:  # for packed rows, `set_batch_sizes` logs a line
        logger.info("token budget · samples are padded: %s", reason)
    return True


def _obstacles(model: nn.Module, settings: Settings, device: torch.device, *, packed: bool) -> Iterator[str]:
    """Yield the reasons why samples must be padded: of the config, of the model, then of the device."""
    is_decoder = isinstance(model, TransformerDecoder)
    collate, ranks = settings.collate_fn, settings.tensor_parallel_dim
    reasons = [
        ("the dataset is packed", packed),
        (f"collate_fn is {collate}, which decides how samples share a microbatch", collate != Settings.collate_fn),
        (f"tensor_parallel_dim is {ranks}", ranks > 1),
        (f"the model is a {_name(model)}, which takes more than text", not is_decoder),
    ]
    for layer in cast(Any, model).layers if is_decoder else ():
        reasons += _obstacles_in(getattr(layer, "attn", None), device)
    reasons += _obstacles_on(device, settings.dtype) if device.type != "cpu" else []
    return (reason for reason, applies in reasons if applies)


def _obstacles_in(attention: Any, device: torch.device) -> list[tuple[str, bool]]:
    if not isinstance(attention, MultiHeadAttention):
        return [(f"{_name(attention)} is not torchtune's attention, which can keep the samples of a row apart", True)]
    call, width, dropout = attention._attention_call, attention.head_dim, attention.attn_dropout
    overrides = "forward" in vars(attention) or type(attention).forward is not MultiHeadAttention.forward
    too_wide = device.type == "cuda" and width > WIDEST_HEAD
    return [
        (f"the model's attention was replaced by {_name(call)}", not isinstance(call, PerSampleAttention)),
        (f"{_name(attention)} overrides forward", overrides),
        (f"the model has attention dropout ({dropout})", dropout > 0),
        ("the model's attention is not causal", not attention.is_causal),
        (f"heads are {width} wide, but flash attention supports at most {WIDEST_HEAD}", too_wide),
    ]


def _obstacles_on(device: torch.device, dtype: str) -> list[tuple[str, bool]]:
    kind = "hip" if torch.version.hip else device.type
    if kind != "cuda":
        return [(f"there is no attention kernel for variable lengths on {kind}", True)]
    reasons = [("dtype is fp32, which flash attention on a GPU does not support", dtype == "fp32")]
    if torch.cuda.is_available():  # a rehearsal has no GPU
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        old = f"{name} (compute capability {capability}) has no flash attention"
        reasons.append((old, capability < FLASH_ATTENTION_2))
    return reasons


def _name(thing: object) -> str:
    """Return the name of a function, or of an object's class without FSDP's prefix."""
    return str(getattr(thing, "__name__", type(thing).__name__.removeprefix("FSDP")))


def _find_dependence(model: nn.Module, device: torch.device) -> str | None:
    """Collective: run the model to test whether the logits of a sample depend on its neighbours in the row.

    Return the reason for padding if they do, else None. Such a model would silently train on wrong contexts.
    `_obstacles` cannot find all causes, for example a hook that shifts tokens, or positions that do not restart.
    """
    (alone,) = _logits(model, device, [TEST_SAMPLE])
    row = [TEST_SAMPLE, TEST_NEIGHBOURS[0], TEST_SAMPLE, TEST_NEIGHBOURS[1], TEST_SAMPLE]
    errors = torch.stack([(logits - alone).norm(dim=-1) for logits in _logits(model, device, row)[::2]])
    most = max(from_all_ranks(float((errors / alone.norm(dim=-1).clamp_min(1e-30)).max())))
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if most <= tolerance:
        return None
    return (
        f"the model's output for a sample depends on the other samples in its row (logits differ by {most:.1%}), so "
        "one of its modules mixes them"
    )


def _logits(model: nn.Module, device: torch.device, row: Sequence[Sequence[int]]) -> list[Tensor]:
    """Collective: run a row of samples without dropout, gradients or compilation; return the logits of each sample."""
    batch = concatenated([{"tokens": list(tokens), "labels": list(tokens)} for tokens in row], ignored=-100)
    del batch["labels"]
    batch_to_device(batch, device)
    try:
        eager = torch.compiler.set_stance("force_eager")
        with evaluating(model), torch.no_grad(), eager, allowing_long_rows(model, batch):
            logits = model(**batch)
    finally:
        if isinstance(model, FSDPModule):
            end_pass_without_backward(model)
    of_row = logits[0] if isinstance(logits, Tensor) else torch.cat(list(logits), dim=1)[0]
    return list(of_row.float().split([len(tokens) for tokens in row]))
