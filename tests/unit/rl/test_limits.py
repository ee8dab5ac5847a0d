"""Prompts that leave no room for an answer, in what the models take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rl.test_settings import DEMO, config
from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.errors import ConfigError, SampleTooLargeError
from torchtune_adaptive.rl.limits import LimitFinder, check_room
from torchtune_adaptive.rl.passes import check_whole_length
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.tune.bad_samples import NamedSamples
from torchtune_adaptive.tune.samples import TEXT

UNKNOWN, SHORT, LONG = (SimpleNamespace(**each) for each in ({}, {"max_seq_len": 20}, {"max_seq_len": 99}))


def check(new: int, sequence_length: int | None = None, *models: Any) -> None:
    check_room(models or (LONG, SHORT), AdaptiveConfig(sequence_length=sequence_length), new)


def test_answers_that_leave_no_token_to_a_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_generated_tokens is 20, .* 20 tokens .* set it to 19 or less"):
        check(20)
    check(19)
    check(20, None, UNKNOWN)


def test_a_length_to_measure_at_is_that_of_a_prompt() -> None:
    with pytest.raises(ConfigError, match=r"adaptive.sequence_length is 9, .* set it to 8 or less, or to null"):
        check(12, 9)
    check(12, 8)


def test_a_rollout_that_is_too_long_is_told_with_what_makes_it_shorter() -> None:
    with pytest.raises(ConfigError, match=r"prompt and its answer have 21 tokens, .* lower max_generated_tokens or"):
        check_whole_length(SHORT, 21)  # type: ignore[arg-type]
    check_whole_length(SHORT, 20)  # type: ignore[arg-type]


def test_by_rows_a_prompt_that_is_too_long_is_named_when_it_is_read() -> None:
    settings, _ = read_ppo_settings(config(DEMO, "use_maximum_batch_size=False"))
    dataset = NamedSamples([{"tokens": [1] * length, "labels": [1] * length} for length in (8, 3, 9)])
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings),
        data=SimpleNamespace(dataset=dataset, kind=TEXT, max_seq_len=16),
        optimization=None,
    )
    asked = {name: SimpleNamespace(model=model) for name, model in (("generate", LONG), ("values", SHORT))}
    stages: Any = SimpleNamespace(stages=asked, runners=SimpleNamespace(limits={}))
    LimitFinder(trainer, stages, SimpleNamespace(max_generated_tokens=12, answers=1)).find(memory=None)
    assert [len(dataset[at]["tokens"]) for at in range(2)] == [8, 3]
    with pytest.raises(
        SampleTooLargeError,
        match=r"^sample 2 of the dataset has 9 tokens, but a microbatch has room for 8 plus an answer, since the "
        r"models take at most 20 tokens \(their max_seq_len\); lower max_generated_tokens, or lower "
        r"tokenizer\.max_seq_len to 8$",
    ):
        dataset[2]
