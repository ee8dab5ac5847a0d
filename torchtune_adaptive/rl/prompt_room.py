"""The room that models leave to a prompt: what they take, less the longest answer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.tune.culprits import longest_taken


def check_room(models: Iterable[nn.Module], adaptive: AdaptiveConfig, ppo: PPOSettings) -> None:
    """Refuses answers beside which there is no room for a prompt, or for one of the length that is measured."""
    taken, new = longest_taken(models), ppo.max_generated_tokens
    if taken is None:
        return
    if taken <= new:
        raise ConfigError(
            f"max_generated_tokens is {new}, but the models take at most {taken} tokens (their max_seq_len) for prompt "
            f"and answer together: set it to {taken - 1} or less"
        )
    wanted = adaptive.sequence_length
    if wanted is not None and wanted > taken - new:
        raise ConfigError(
            f"adaptive.sequence_length is {wanted}, but the models take at most {taken} tokens (their max_seq_len), of "
            f"which {new} are for the answer (max_generated_tokens): set it to {taken - new} or less, or to null"
        )


def check_whole_length(model: nn.Module, longest: int) -> None:
    """Refuses a rollout that is longer than the model takes."""
    taken = longest_taken([model])
    if taken is not None and longest > taken:
        raise ConfigError(
            f"a prompt and its answer have {longest} tokens, but the model takes at most {taken} (its max_seq_len): "
            "lower max_generated_tokens or tokenizer.max_seq_len"
        )
