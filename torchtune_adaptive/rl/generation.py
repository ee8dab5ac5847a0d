"""Answers to prompts, by torchtune's cached decoder: a pass without a backward that can be run again.

Unlike torchtune's own loop this one keeps no logits and always runs to the full length, so that every microbatch of
every rank communicates the same under FSDP. Each sample has a random generator of its own, on the host: one that the
rows of a microbatch share would draw other numbers after a recovery, under another limit, on other ranks.
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
    """How the tokens of an answer are chosen, and where it ends."""

    temperature: float = 1.0
    top_k: int | None = None
    pad_id: int = 0
    """What follows a stop token."""
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    """The seed of what is drawn, beside iteration and rollout."""


def sampling_of(tokenizer: Tokenizer, rl: RolloutSettings, seed: int) -> Sampling:
    """Sampling as the config says, with its stop tokens or else the tokenizer's."""
    return Sampling(
        temperature=rl.temperature,
        top_k=rl.top_k,
        pad_id=tokenizer.pad_id,
        stop_tokens=rl.stop_token_ids or tuple(getattr(tokenizer, "stop_tokens", ())),
        seed=seed,
    )


def draws(keys: Sequence[tuple[object, ...]], count: int) -> Tensor:
    """`count` numbers from 0 up to 1 for each key, a row each, on the host. They depend on the key alone."""
    # Not torch's generator: on the host it keeps 32 bits of a seed, so two samples in a long run would share theirs.
    rows = [[generator.random() for _ in range(count)] for generator in (Random(repr(key)) for key in keys)]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), count)


def choose(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """One choice a row: the first whose cumulated probability exceeds the number that was drawn for the row. Rows need
    not sum to one. What has no probability is never chosen."""
    cumulated = probabilities.double().cumsum(-1)
    threshold = drawn.to(cumulated.device)[..., None] * cumulated[..., -1:]
    chosen = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    # A number next to 1 may round up to the total, which nothing exceeds: then it is the last that adds to it.
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
    """Collective: the new tokens, for each of which `drawn` has a number. Rows of one group, by their numbers, have one
    prompt, which goes through the model once."""
    rows, new = drawn.shape
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((rows, longest + new), sampling.pad_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = prompt
    places = torch.arange(longest + new, device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    real = places >= padding[:, None]  # by place and not by token: a prompt may contain the padding's
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
            # Padding before a prompt sees itself: attention to nothing would be NaN, and stay in the cache.
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
    """Layer by layer, so that no more than one of the small caches is there beside the large ones."""
    for module in model.modules():
        cache = getattr(module, "kv_cache", None)
        if cache is not None:
            cache.k_cache, cache.v_cache = cache.k_cache[rows], cache.v_cache[rows]


@contextmanager
def _caching(
    model: TransformerDecoder, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Open, the model keeps keys and values, and does not drop out. torchtune's own context manager would leave caches
    half made where memory runs out amid them."""
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
