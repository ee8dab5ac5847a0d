"""What a rollout is cut to where needs are measured over lengths, and what only keeps a rank's peers company."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtune_adaptive.errors import SampleError
from torchtune_adaptive.rl.rollouts import (
    COUNTS,
    VALUED,
    Rollout,
    answer_tokens,
    rollouts_of,
    sequences_of,
    worst_rollout,
)
from torchtune_adaptive.tune.culprits import NamedSamples, naming_bad_samples

PROMPT, NEW = 16, 12
WORST = worst_rollout(torch.arange(PROMPT), NEW)


@pytest.mark.parametrize("length", range(2, PROMPT + NEW + 1))
def test_no_rollout_of_a_length_has_a_longer_answer_than_the_one_that_is_measured(length: int) -> None:
    cut = WORST.answered(length)
    assert cut.whole_length == length
    assert cut.length == min(NEW, length - 1)
    assert cut.kept[COUNTS].sum() == cut.kept[VALUED].sum() == cut.length
    assert sequences_of([cut]).tokens.shape == (1, length)


@pytest.mark.parametrize("length", range(NEW + 1, PROMPT + NEW + 1))
def test_what_is_to_be_generated_has_all_new_tokens_however_short_it_is(length: int) -> None:
    cut = WORST.prompting(length)
    assert (cut.most_length, len(cut.answer)) == (length, NEW)


def test_cutting_leaves_a_rollout_as_it_was() -> None:
    before = {name: found.clone() for name, found in WORST.kept.items()}
    WORST.answered(5), WORST.prompting(15)
    assert (WORST.whole_length, WORST.most_length) == (PROMPT + NEW, PROMPT + NEW)
    assert all(torch.equal(WORST.kept[name], found) for name, found in before.items())


def test_the_tokens_of_a_filler_count_nothing() -> None:
    filler = WORST.filler()
    assert not filler.kept[COUNTS].any()
    assert answer_tokens([filler]) == 0
    assert answer_tokens([WORST, filler]) == NEW
    filler.length = 7  # as after generating
    assert answer_tokens([filler]) == 0
    assert isinstance(filler, Rollout)


def test_a_prompt_of_fractions_is_named_and_not_cut_to_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    prompts = NamedSamples([{"tokens": tokens, "labels": tokens} for tokens in ([1, 2], [1.5, 2.5])])
    told = r"sample 1 of the dataset \(on rank 0\) has tokens that are not a list of integers \(\[1.5, 2.5\]\)"
    with pytest.raises(SampleError, match=told), naming_bad_samples(nn.Identity(), prompts, last=2):
        rollouts_of([prompts[0], prompts[1]], 1, NEW)
