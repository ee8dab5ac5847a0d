"""The library's advice, as somebody reads it who wrote a config."""

import pickle

import pytest
import torch
from torch import nn

from torchtune_adaptive import (
    MemoryMeter,
    Recovery,
    RowLimit,
    SampleKind,
    StepRunner,
    TrainingStep,
    find_max_batch_size,
)
from torchtune_adaptive.config.remedies import KEYS, KEYS_IN_PPO, in_keys
from torchtune_adaptive.errors import AdaptiveError, ConfigError, LimitExhaustedError, Remedy

FACT = "a microbatch of 1 row of 512 tokens does not fit and cannot be made smaller"
EXHAUSTED = LimitExhaustedError(FACT, Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS)


def test_every_remedy_has_its_words() -> None:
    assert set(KEYS) == set(KEYS_IN_PPO) == set(Remedy)


def test_a_rollout_is_shorter_by_its_answer_too() -> None:
    told = in_keys(EXHAUSTED, KEYS_IN_PPO)
    assert "smaller; lower max_generated_tokens or tokenizer.max_seq_len, set enable_activation" in told


def test_the_library_says_what_to_give_and_the_recipe_what_to_set() -> None:
    assert str(EXHAUSTED) == f"{FACT}; use shorter samples, checkpoint activations, or train on more ranks"
    assert in_keys(EXHAUSTED) == (
        f"{FACT}; lower tokenizer.max_seq_len (and adaptive.sequence_length if set), "
        "set enable_activation_checkpointing: True, or train on more ranks"
    )


def test_an_error_keeps_its_remedies_on_the_way_to_another_process() -> None:
    sent: AdaptiveError = pickle.loads(pickle.dumps(EXHAUSTED))
    assert isinstance(sent, LimitExhaustedError)
    assert in_keys(sent) == in_keys(EXHAUSTED)


def test_a_strategy_that_would_end_the_run_is_refused_under_the_name_of_its_key() -> None:
    model = nn.Linear(1, 1)
    runner = StepRunner(
        model,
        lambda _: None,
        limit=RowLimit(1),
        kind=SampleKind(length_of=len, stand_in=lambda sample: sample),
        recovery=Recovery(model, enabled=False),
    )
    step = TrainingStep(runner=runner, sample=torch.ones(1), update=lambda _: None, optimizers=[])
    with pytest.raises(ConfigError, match=r"'binary' runs out of memory .* pass strategy='linear'") as caught:
        find_max_batch_size(step, memory=MemoryMeter(1), strategy="binary")
    assert in_keys(caught.value).endswith("; set adaptive.search to linear")
