"""Choices of tokens, truncated prompts, and log-probabilities of answers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune.models.llama3_2 import llama3_2

from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.rl.generation import choose, draws
from torchtune_adaptive.rl.rollouts import (
    Rollout,
    build_prompts,
)
from torchtune_adaptive.rl.stages import AnswerScorer


def test_choices_follow_their_probabilities() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0, 0.0])
    chosen = choose(weights.expand(20_000, -1), draws([(each,) for each in range(20_000)], 1)[:, 0])
    assert torch.bincount(chosen, minlength=5) == pytest.approx([2000, 0, 6000, 12_000, 0], rel=0.06)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_zero_probability_is_never_chosen(drawn: float) -> None:
    """Not even at either end of the range, or if the number was rounded up."""
    weights = torch.tensor([[0.0, 1e-30, 0.0, 0.3, 0.0]])
    assert weights[0, choose(weights, torch.tensor([drawn], dtype=torch.float64))] > 0


MESH: Any = {"dp": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}


def samples_of(tokenizer: Any) -> list[Any]:
    """Component of a dataset."""
    return [{"tokens": tokens, "labels": tokens} for tokens in ([1, 2], [3])]


def test_prompts_are_truncated_to_the_length_of_the_tokenizer() -> None:
    cfg = OmegaConf.create({"dataset": {"_component_": f"{__name__}.samples_of"}})
    dataset: Any = build_prompts(Settings(**NEEDED, config=cfg), SimpleNamespace(max_seq_len=1, pad_id=0), MESH).dataset
    assert [dataset[index]["tokens"] for index in range(2)] == [[1], [3]]


WIDTH = 6
"""Number of generated tokens; answers end sooner."""


def rollouts() -> list[Rollout]:
    """Return rollouts with prompts of 2, 9 and 5 tokens and answers of 5, 1 and 3."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, (prompt, length) in enumerate([(2, 5), (9, 1), (5, 3)]):
        tokens, answer = (torch.randint(0, 64, (count,), generator=generator) for count in (prompt, WIDTH))
        made.append(Rollout(number, 0, tokens, answer, length=length))
    return made


def test_only_answer_tokens_get_logits() -> None:
    """Runs of the PPO recipe have the values of torchtune's."""
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48, max_seq_len=16
    )
    seen: list[tuple[int, ...]] = []
    model.norm.register_forward_hook(lambda _, __, states: seen.append(tuple(states.shape)))
    everything = rollouts()
    found = AnswerScorer(device=torch.device("cpu"), temperature=0.7).log_probs(model, everything)
    longest_answer = 5
    assert seen == [(3, longest_answer, 32)]
    assert found.shape == (3, WIDTH)
    assert not any(row[rollout.length :].any() for rollout, row in zip(everything, found, strict=True))
    model(everything[0].tokens[None])
    assert seen[1:] == [(1, len(everything[0].tokens), 32)], "afterwards, all tokens"
