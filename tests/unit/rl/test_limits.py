"""Prompts that leave no space for an answer within the model's maximum length."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rl.test_settings import DEMO, config
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.errors import ConfigError, SampleTooLargeError
from torchtune_adaptive.rl.limits import LimitFinder
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.tune.checked_dataset import CheckedDataset, Longest
from torchtune_adaptive.tune.samples import TEXT

UNKNOWN, SHORT, LONG = (SimpleNamespace(**each) for each in ({}, {"max_seq_len": 20}, {"max_seq_len": 99}))


def finder_of(loop: Any, models: Mapping[str, Any], new: int) -> LimitFinder:
    stages: Any = SimpleNamespace(
        by_name={name: SimpleNamespace(model=model) for name, model in models.items()},
        runners=SimpleNamespace(limits={"generate": RowLimit(1)}),
    )
    rl: Any = SimpleNamespace(max_generated_tokens=new)
    return LimitFinder(loop, stages, rl)


def test_answers_leave_space_for_a_prompt_in_every_model() -> None:
    loop: Any = SimpleNamespace(run=SimpleNamespace(settings=None), data=None, optimization=None)
    models = {"generate": LONG, "values": SHORT}
    with pytest.raises(ConfigError, match=r"max_generated_tokens is 20, .* 19 or less"):
        finder_of(loop, models, 20)
    finder_of(loop, models, 19)
    finder_of(loop, {"generate": UNKNOWN}, 20)


@pytest.mark.parametrize("cut_at", [None, 16, 8])
def test_prompt_without_space_for_an_answer_is_named_before_training_with_row_limits_too(
    cut_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = read_ppo_settings(config(DEMO, "use_maximum_batch_size=False"))
    dataset = CheckedDataset([{"tokens": [1] * length, "labels": [1] * length} for length in (8, 3, 9)])
    loop: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings),
        data=SimpleNamespace(dataset=dataset, kind=TEXT, max_seq_len=cut_at),
        optimization=None,
    )
    finder, dataset.truncate_at = finder_of(loop, {"generate": LONG, "values": SHORT}, 12), cut_at
    monkeypatch.setattr(CheckedDataset, "longest", lambda self: Longest(2, len(self[2]["tokens"])))
    if cut_at == 8:
        finder.find(memory=None)
        assert [len(dataset[at]["tokens"]) for at in range(3)] == [8, 3, 8]
        return
    with pytest.raises(SampleTooLargeError, match=r"^sample 2 .* 9 tokens, .* room for 8 .*max_seq_len to 8$"):
        finder.find(memory=None)
