"""Answers to prompts, by torchtune's cached decoder: a pass without a backward that can be run again.

Unlike torchtune's own loop this one keeps no logits, draws by sample, and always runs to the full length, so that every
microbatch of every rank communicates the same under FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.rl.draws import choose


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are chosen, and where it ends."""

    temperature: float = 1.0
    """0 takes the most probable tokens and draws nothing."""
    top_k: int | None = None
    pad_id: int = 0
    """What follows a stop token."""
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    """The seed of what is drawn, beside iteration and rollout."""


def generate(
    model: TransformerDecoder,
    prompts: Sequence[Tensor],
    drawn: Tensor,
    sampling: Sampling,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Collective: the new tokens, rows × columns of `drawn`: one number for each token, from 0 to 1, as of `draws`."""
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
    with torch.no_grad(), _caching(model, rows, longest + new, device, dtype):
        begin = 0
        for end in places_of_answers(longest, new):
            asking = places[begin:end]
            # Padding before a prompt sees itself: attention to nothing would be NaN, and stay in the cache.
            mask = (real[:, None] & (places <= asking[:, None])) | (places == asking[:, None])
            logits = model(tokens[:, begin:end], mask=mask, input_pos=positions[:, begin:end])[:, -1]
            found = _next(logits.float(), drawn[:, end - longest], sampling)
            tokens[:, end] = torch.where(ended, sampling.pad_id, found)
            ended |= torch.isin(found, stops)
            begin = end
    return tokens[:, longest:]


def places_of_answers(longest: int, new: int) -> range:
    """The columns that are chosen one after another, behind the longest prompt."""
    return range(longest, longest + new)


def _next(logits: Tensor, drawn: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return choose((logits / sampling.temperature).softmax(-1), drawn)


@contextmanager
def _caching(
    model: TransformerDecoder, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Open, the model keeps keys and values, and does not drop out; nothing of that is left afterwards.

    Neither is where memory runs out while the caches are made, which torchtune's own context manager would leave half
    made: it looks at the first layer only, and only once all are there.
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
