"""Log-probabilities of answers, with logits computed only for answer tokens."""

import torch
from torch import Tensor, nn
from torchtune.models.llama3_2 import llama3_2

from torchtune_adaptive.rl.microbatches import AnswerScorer
from torchtune_adaptive.rl.rollouts import Rollout

TEMPERATURE = 0.7
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


def alone(model: nn.Module, rollout: Rollout) -> Tensor:
    """Return the log-probabilities of one rollout from all its logits."""
    all_logits: Tensor = model(rollout.tokens[None])[0].float() / TEMPERATURE
    first = len(rollout.prompt)
    of_answer = all_logits.log_softmax(-1)[first - 1 : first - 1 + rollout.length]
    return of_answer.gather(1, rollout.answer[: rollout.length, None])[:, 0]


def test_only_answer_tokens_get_logits_with_unchanged_values() -> None:
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48, max_seq_len=16
    )
    seen: list[tuple[int, ...]] = []
    model.norm.register_forward_hook(lambda _, __, states: seen.append(tuple(states.shape)))
    everything = rollouts()
    found = AnswerScorer(device=torch.device("cpu"), temperature=TEMPERATURE).log_probs(model, everything)
    longest_answer = 5
    assert seen == [(3, longest_answer, 32)]
    assert found.shape == (3, WIDTH)
    for rollout, of_rollout in zip(everything, found, strict=True):
        torch.testing.assert_close(of_rollout[: rollout.length], alone(model, rollout), rtol=1e-5, atol=1e-5)
        assert not of_rollout[rollout.length :].any()
    assert seen[1:] == [(1, len(rollout.tokens), 32) for rollout in everything], "afterwards, all tokens"
