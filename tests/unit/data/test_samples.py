"""Kinds of sample, one sequence or a pair, in limits, packing and fillers. Invalid samples are named by their index,
and those that do not fit with remedies.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf
from torch import nn

from tests.unit.data.minimal_config import NEEDED
from tests.unit.data.models import build
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.data.loading import CheckedDataset
from torchtune_adaptive.data.samples import FILLER, INDEX, PAIR, TEXT, cost_of
from torchtune_adaptive.errors import SampleError, SampleTooLargeError
from torchtune_adaptive.loop import batch_size
from torchtune_adaptive.loop.batch_size import check_lengths, worst_sample

JOINED = replace(PAIR, padded=False)


def pair(chosen: int, rejected: int) -> dict[str, Any]:
    return {
        "chosen_input_ids": [*range(chosen)],
        "chosen_labels": [-100, *range(1, chosen)],
        "rejected_input_ids": [*range(rejected)],
        "rejected_labels": [-100, *range(1, rejected)],
    }


def test_collate_functions_do_not_see_internal_fields() -> None:
    sample = {INDEX: 7, "tokens": [1, 2, 3], "labels": [1, 2, 3], "encoder_input": {}}
    (row,) = TEXT.rows_of([TEXT.filler(sample)])
    assert row.keys() == {"tokens", "labels", "encoder_input"}
    assert all(row.keys() == {"tokens", "labels"} for row in PAIR.rows_of([{**pair(2, 3), INDEX: 7, FILLER: True}]))


def test_answer_without_tokens_becomes_one_without_labels() -> None:
    empty = {**pair(3, 3), "rejected_input_ids": [], "rejected_labels": []}
    assert PAIR.rows_of([empty])[1] == {"tokens": [0], "labels": [-100]}


def test_attention_makes_long_samples_cost_more_than_their_tokens() -> None:
    model = build()
    cost, parameters = cost_of(model), sum(each.numel() for each in model.layers[0].parameters())
    assert cost(1) == pytest.approx(1, rel=0.01)
    assert cost(100) == pytest.approx(100 * (1 + 100 * 32 / parameters))


def test_sample_costs_its_tokens_if_the_cost_of_attention_is_unknown() -> None:
    strange = build()
    strange.layers[0].attn = nn.Linear(1, 1)
    assert cost_of(strange)(100) == cost_of(nn.Linear(1, 1))(100) == 100


def test_sample_of_another_kind_is_named() -> None:
    with pytest.raises(SampleError, match=r"^sample 0 .*\(KeyError: 'tokens'\)"):
        CheckedDataset([{"chosen_input_ids": [1]}])[0]


def test_pair_longer_than_a_microbatch_is_named_with_the_tokens_of_both_answers() -> None:
    pairs = [JOINED.uniform(1, length) for length in (886, 984)]
    samples = CheckedDataset(pairs, JOINED)
    samples.length_limit = 887, "; raise it"
    assert samples[0][INDEX] == 0
    with pytest.raises(SampleTooLargeError, match=r"^sample 1 .* 984 tokens in both .* room for 887; raise it$"):
        samples[1]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


def settings(changed: dict[str, Any] | None = None, **adaptive: Any) -> Settings:
    return Settings(**{**NEEDED, **(changed or {}), "adaptive": AdaptiveConfig(**adaptive)})


@pytest.mark.parametrize(("most", "measured"), [(None, 4096), (8192, 8192)])
def test_search_measures_more_rows_than_the_default_bound_only_if_the_config_says_so(
    most: int | None, measured: int
) -> None:
    loop = mock.Mock()
    loop.run.settings = settings(max_batch_size=most)
    with (
        mock.patch.object(batch_size, "find_max_batch_size", side_effect=KeyError) as search,
        pytest.raises(KeyError),
    ):
        batch_size.search_rows(loop, mock.Mock(length=16), mock.MagicMock(), most_rows=2**18)
    assert search.call_args.kwargs["max_rows"] == measured


@pytest.mark.parametrize(("asked", "tokenizer", "model"), [(256, 64, None), (64, None, 2048), (None, 128, 64)])
def test_search_measures_the_smallest_of_all_limits(
    asked: int | None, tokenizer: int | None, model: int | None
) -> None:
    dataset = CheckedDataset([TEXT.uniform(1, 30)])
    dataset.most_tokens = model
    data: Any = SimpleNamespace(dataset=dataset, kind=TEXT, packed=False, max_seq_len=tokenizer)
    assert TEXT.length_of(worst_sample(data, asked)) == 64


def too_long(budget: int | str, max_seq_len: int | None = None, **changed: Any) -> str:
    """Return the error for a pair of 984 tokens, of which a microbatch can hold 887."""
    data: Any = SimpleNamespace(dataset=CheckedDataset([JOINED.uniform(1, 984)], JOINED), kind=JOINED, max_seq_len=None)
    cfg = OmegaConf.create({"tokenizer": {"max_seq_len": max_seq_len}})
    with pytest.raises(SampleTooLargeError, match=r"^sample 0 .* 984 tokens .* room for 887") as error:
        check_lengths(settings({**changed, "config": cfg}, token_budget=budget), data, 887)
    return str(error.value)


def test_remedies_for_a_too_long_sample_depend_on_the_limit_and_the_settings() -> None:
    assert too_long(887).endswith("; raise adaptive.token_budget, or lower tokenizer.max_seq_len to 443")
    assert JOINED.length_at(443) <= 887 < JOINED.length_at(444)
    ignored_by_the_dataset = too_long(887, max_seq_len=300)
    assert "truncates samples to tokenizer.max_seq_len (300)" in ignored_by_the_dataset
    assert "lower tokenizer.max_seq_len" not in ignored_by_the_dataset
    for checkpoints in (True, False):
        by_memory = too_long("auto", enable_activation_checkpointing=checkpoints)
        assert "raise adaptive.token_budget" not in by_memory
        assert ("enable_activation_checkpointing" in by_memory) is not checkpoints
