"""Generate answers with torchtune's KV cache, in a forward pass that can be retried.

Unlike torchtune's generation loop, this one keeps no logits and always generates the full length, so that all
microbatches on all ranks issue the same FSDP collectives. Random numbers are drawn on the host and per sample. Answers
therefore depend neither on the microbatch size, nor on retries, nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.rl.settings import RolloutSettings
from torchtune_adaptive.tune.data import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop tokens."""

    temperature: float = 1.0
    top_k: int | None = None
    pad_id: int = 0
    """Token that fills an answer after its stop token."""
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    """Seed of all draws, combined with the iteration and the rollout's number."""


def sampling_of(tokenizer: Tokenizer, rl: RolloutSettings, seed: int) -> Sampling:
    """Build the sampling parameters; the tokenizer's stop tokens are the default."""
    return Sampling(
        temperature=rl.temperature,
        top_k=rl.top_k,
        pad_id=tokenizer.pad_id,
        stop_tokens=rl.stop_token_ids or tuple(getattr(tokenizer, "stop_tokens", ())),
        seed=seed,
    )


def draws(keys: Sequence[tuple[object, ...]], count: int) -> Tensor:
    """Draw `count` uniform numbers in [0, 1) per key, on the host: one row per key, which depends only on that key."""
    # torch's CPU generator uses 32 bits of its seed, so samples of a long run would collide.
    rows = [[generator.random() for _ in range(count)] for generator in (Random(repr(key)) for key in keys)]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), count)


def choose(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """Sample one index per row by inverting the cumulative distribution at the number drawn for the row.

    Rows need not sum to one. An index of probability 0 is never chosen.
    """
    cumulated = probabilities.double().cumsum(-1)
    threshold = drawn.to(cumulated.device)[..., None] * cumulated[..., -1:]
    chosen = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    # A draw close to 1 may round to the total, beyond the last index: clamp to the last one with a probability above 0.
    last = (cumulated < cumulated[..., -1:]).sum(-1)
    return torch.minimum(chosen, last)


def generate(
    model: TransformerDecoder,
    prompts: Sequence[Tensor],
    drawn: Tensor,
    sampling: Sampling,
    *,
    device: torch.device,
    dtype: torch.dtype,
    groups: Sequence[int | None] = (),
) -> Tensor:
    """Collective: generate one token per column of `drawn`, and return the new tokens.

    Rows with the same number in `groups` share one prompt, which is prefilled once.
    """
    rows, new = drawn.shape
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((rows, longest + new), sampling.pad_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = prompt
    places = torch.arange(longest + new, device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    real = places >= padding[:, None]  # by position: a prompt may contain the pad token
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(sampling.stop_tokens), dtype=tokens.dtype, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    drawn = drawn.to(device)
    firsts: dict[int, int] = {}
    groups = groups or [None] * rows
    same = [row if group is None else firsts.setdefault(group, row) for row, group in enumerate(groups)]
    distinct = sorted(set(same))
    with torch.no_grad(), _caching(model, len(distinct), longest + new, device, dtype):
        begin = 0
        for end in range(longest, longest + new):
            queries = places[begin:end]
            # Padding attends to itself: a fully masked row would be NaN and stay in the cache.
            mask = (real[:, None] & (places <= queries[:, None])) | (places == queries[:, None])
            now = slice(None) if begin else distinct
            logits = model(tokens[now, begin:end], mask=mask[now], input_pos=positions[now, begin:end])[:, -1].float()
            if not begin and len(distinct) < rows:
                of_rows = torch.tensor([distinct.index(first) for first in same], device=device)
                logits = logits[of_rows]
                _repeat_caches(model, of_rows)
            if sampling.top_k is not None:
                least = logits.topk(min(sampling.top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            chosen = choose((logits / sampling.temperature).softmax(-1), drawn[:, end - longest])
            tokens[:, end] = torch.where(ended, sampling.pad_id, chosen)
            ended |= torch.isin(chosen, stops)
            begin = end
    return tokens[:, longest:]


def _repeat_caches(model: TransformerDecoder, rows: Tensor) -> None:
    """Expand the caches of the distinct prompts to all rows, layer by layer to limit peak memory."""
    for module in model.modules():
        cache = getattr(module, "kv_cache", None)
        if cache is not None:
            cache.k_cache, cache.v_cache = cache.k_cache[rows], cache.v_cache[rows]


@contextmanager
def _caching(
    model: TransformerDecoder, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Enable the KV cache and evaluation mode within the context.

    torchtune's context manager would leave some layers with caches if allocating them ran out of memory.
    """
    training = model.training
    try:
        model.eval()
        with device:
            model.setup_caches(rows, dtype, decoder_max_seq_len=length)
        yield
    finally:
        for module in model.modules():
            if hasattr(module, "kv_cache"):
                module.kv_cache, module.cache_enabled = None, False
        model.train(training)
