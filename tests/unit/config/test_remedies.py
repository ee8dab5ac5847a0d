"""The library's advice in terms of config keys."""

import pickle

from torchtune_adaptive.config.remedies import KEYS, KEYS_IN_PPO
from torchtune_adaptive.errors import AdaptiveError, LimitExhaustedError, Remedy

FACT = "a microbatch of 1 row of 512 tokens does not fit and cannot be made smaller"
EXHAUSTED = LimitExhaustedError(FACT, Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS)


def test_every_remedy_has_a_text() -> None:
    assert set(KEYS) == set(KEYS_IN_PPO) == set(Remedy)


def test_library_names_arguments_and_recipes_name_keys() -> None:
    assert str(EXHAUSTED) == f"{FACT}; use shorter samples, checkpoint activations, or train on more ranks"
    assert EXHAUSTED.in_words(KEYS) == (
        f"{FACT}; lower tokenizer.max_seq_len (and adaptive.sequence_length if set), "
        "set enable_activation_checkpointing: True, or train on more ranks"
    )
    assert "lower max_generated_tokens or tokenizer.max_seq_len" in EXHAUSTED.in_words(KEYS_IN_PPO)


def test_error_keeps_its_remedies_when_pickled() -> None:
    sent: AdaptiveError = pickle.loads(pickle.dumps(EXHAUSTED))
    assert isinstance(sent, LimitExhaustedError)
    assert sent.in_words(KEYS) == EXHAUSTED.in_words(KEYS)
