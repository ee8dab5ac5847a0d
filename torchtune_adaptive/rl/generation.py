"""Generate answers with torchtune's KV cache, in a forward pass that can be repeated.

Unlike torchtune's generation loop, this one keeps no logits. It always generates the full length, so that all
microbatches on all ranks issue the same FSDP collectives. Random numbers are drawn on the host, separately for each
rollout, so answers depend neither on the microbatch size, nor on repetitions, nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtune import training
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.lifecycle.distributed import Devices
from torchtune_adaptive.rl.rollouts import Rollout, answer_tokens
from torchtune_adaptive.rl.settings import PPOSettings


def draws(keys: Sequence[tuple[object, ...]], count: int) -> Tensor:
    """Return uniform random numbers in [0, 1): a row of `count` numbers for each key, seeded with that key alone."""
    # torch's CPU generator uses only 32 bits of a seed, so two samples of a long run might have the same seed.
    rows = [[generator.random() for _ in range(count)] for generator in (Random(repr(key)) for key in keys)]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), count)


def choose(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """Sample one index per row, by inverting the cumulative distribution at the random number `drawn` for the row.

    Rows need not sum to one. An index of probability 0 is never chosen.
    """
    cumulated = probabilities.double().cumsum(-1)
    threshold = drawn.to(cumulated.device)[..., None] * cumulated[..., -1:]
    chosen = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    # A number close to 1 may be rounded to the total, beyond all indices: use the last one with a probability above 0.
    last = (cumulated < cumulated[..., -1:]).sum(-1)
    return torch.minimum(chosen, last)


def generate(
    model: TransformerDecoder,
    prompts: Sequence[Tensor],
    drawn: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float = 1.0,
    top_k: int | None = None,
    pad_id: int = 0,
    stop_tokens: Sequence[int] = (),
) -> Tensor:
    """Collective: generate one token per column of the random numbers `drawn`, and return the new tokens. After a stop
    token, an answer is padded with `pad_id`."""
    rows, new = drawn.shape
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((rows, longest + new), pad_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = prompt
    columns = torch.arange(longest + new, device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    is_token = columns >= padding[:, None]  # do not compare with the pad token, which a prompt may contain
    positions = (is_token.cumsum(-1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(stop_tokens), dtype=tokens.dtype, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    drawn = drawn.to(device)
    with torch.no_grad(), _kv_cache(model, rows, longest + new, device, dtype):
        begin = 0
        for end in range(longest, longest + new):
            queries = columns[begin:end]
            # Padding attends to itself. Otherwise, its output would be NaN and stay in the cache.
            mask = (is_token[:, None] & (columns <= queries[:, None])) | (columns == queries[:, None])
            logits = model(tokens[:, begin:end], mask=mask, input_pos=positions[:, begin:end])[:, -1].float()
            if top_k is not None:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            chosen = choose((logits / temperature).softmax(-1), drawn[:, end - longest])
            tokens[:, end] = torch.where(ended, pad_id, chosen)
            ended |= torch.isin(chosen, stops)
            begin = end
    return tokens[:, longest:]


@contextmanager
def _kv_cache(
    model: TransformerDecoder, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Enable the KV cache and evaluation mode within the context.

    torchtune's context manager would leave caches in some layers if it ran out of memory while it allocates them.
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


class Generate:
    """Generates an answer for each rollout of a microbatch with the policy."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        settings: Settings,
        rl: PPOSettings,
        devices: Devices,
        seed: int,
    ) -> None:
        """Use the stop tokens of the config or, if it has none, those of the tokenizer. Random numbers depend only on
        `seed`, the iteration and the number of the rollout."""
        self.model, self.device, self.seed = model, devices.device, seed
        self.stop_tokens = rl.stop_token_ids or tuple(getattr(tokenizer, "stop_tokens", ()))
        sampling = {"temperature": rl.temperature, "top_k": rl.top_k, "pad_id": tokenizer.pad_id}
        places = {"device": devices.device, "dtype": training.get_dtype(settings.dtype, device=devices.device)}
        self._options: dict[str, Any] = {**sampling, **places, "stop_tokens": self.stop_tokens}
        self._reshards = settings.fsdp_reshard_after_forward and isinstance(model, FSDPModule)

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Collective: generate an answer for each rollout and store it with its length."""
        prompts, width = [rollout.prompt for rollout in rollouts], len(rollouts[0].answer)
        drawn = draws([(self.seed, "generate", each.iteration, each.number) for each in rollouts], width)
        policy: Any = self.model
        # If only one token is generated, no later one needs the gathered parameters.
        disable_resharding = self._reshards and width > 1
        if disable_resharding:
            policy.set_reshard_after_forward(False)
        try:
            with torch.compiler.set_stance("force_eager"):
                answers = generate(policy, prompts, drawn, **self._options).cpu()
        finally:
            if disable_resharding:
                policy.set_reshard_after_forward(True)
        lengths = lengths_of(answers, self.stop_tokens)
        for rollout, answer, length in zip(rollouts, answers, lengths, strict=True):
            rollout.answer, rollout.length = answer.clone(), length
        return Totals(torch.zeros((), device=self.device), answer_tokens(rollouts))


def lengths_of(answers: Tensor, stop_tokens: Sequence[int]) -> list[int]:
    """Return the number of tokens of each answer, up to and including its first stop token."""
    stops = torch.isin(answers, answers.new_tensor(stop_tokens))
    lengths: list[int] = (stops.cumsum(1) - stops.long() == 0).sum(1).tolist()
    return lengths
