"""The keys of `adaptive_plan`: where the allocator's setting comes from."""

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.plan.settings import (
    PlanSettings,
    allocator_settings,
    budget,
    expandable_segments,
    read_plan_settings,
)


@pytest.mark.parametrize(
    ("key", "environment", "expected"),
    [
        (None, {}, False),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, True),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        (None, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": ""}, True),
        (False, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        (True, {}, True),
    ],
)
def test_segments_expand_as_the_key_says_else_as_the_environment_does(
    key: bool | None, environment: dict[str, str], expected: bool
) -> None:
    assert expandable_segments(PlanSettings(expandable_segments=key), environment) is expected


def test_the_allocators_settings_are_read_pair_by_pair() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2]"}
    assert allocator_settings(given)[0] == ("max_split_size_mb", "128")
    assert allocator_settings({}) == []


def test_a_rank_has_what_the_question_says_and_else_what_the_run_may_use() -> None:
    adaptive = read_adaptive(OmegaConf.create({"memory_limit": "24GiB"}))
    assert budget(PlanSettings(), adaptive, on_gpu=False).limit_bytes == 24 * 2**30
    assert budget(PlanSettings(memory_limit="1GiB"), adaptive, on_gpu=False).limit_bytes == 2**30
    of_each = read_adaptive(OmegaConf.create({"memory_limit": ["2GiB", "1GiB"]}))
    assert budget(PlanSettings(world_size=2), of_each, on_gpu=False).limit_bytes == 2**30


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        (None, "memory_limit is null: set it to the memory of a rank"),
        (["1GiB", "2GiB"], "adaptive.memory_limit has 2 amounts and world_size is 1: give one per rank"),
        (0.9, "adaptive.memory_limit is 0.9: a fraction needs a device; give memory_limit, an amount"),
    ],
)
def test_a_limit_that_is_no_amount_for_every_rank_is_nothing_to_predict_with(limit: object, named: str) -> None:
    adaptive = read_adaptive(OmegaConf.create({"memory_limit": limit}))
    with pytest.raises(ConfigError, match=named):
        budget(PlanSettings(), adaptive, on_gpu=False)


@pytest.mark.parametrize(("overhead", "expected"), [(0, 0), ("0GiB", 0), ("0 b", 0), ("256MiB", 2**28), (None, 2**30)])
def test_what_is_not_for_tensors_may_be_nothing(overhead: object, expected: int) -> None:
    plan = read_plan_settings(OmegaConf.create({"memory_limit": "8GiB", "memory_overhead": overhead}))
    assert budget(plan, read_adaptive(None), on_gpu=True).overhead_bytes == expected


@pytest.mark.parametrize("overhead", [1, -1, False, 0.5])
def test_an_overhead_without_a_unit_is_refused(overhead: object) -> None:
    with pytest.raises(ConfigError, match=r"memory_overhead is .*: allowed is a string or 0 or null"):
        read_plan_settings(OmegaConf.create({"memory_overhead": overhead}))


@pytest.mark.parametrize("overhead", ["h100", "0.0", "00xB", "0.5"])
def test_an_overhead_is_an_amount_and_no_card(overhead: str) -> None:
    plan = read_plan_settings(OmegaConf.create({"memory_limit": "8GiB", "memory_overhead": overhead}))
    with pytest.raises(ConfigError, match="memory_overhead"):
        budget(plan, read_adaptive(None), on_gpu=True)


def test_settings_are_compared_for_one_number_of_ranks() -> None:
    several = OmegaConf.create({"memory_limit": "h100", "world_size": [1, 2], "advise": True})
    with pytest.raises(ConfigError, match=r"advise is True and world_size is \[1, 2\], .* remove advise"):
        read_plan_settings(several)
    assert read_plan_settings(OmegaConf.merge(several, {"advise": None})).several_ranks == (1, 2)
    assert read_plan_settings(OmegaConf.merge(several, {"world_size": 2})).several_ranks == (2,)
    assert read_plan_settings(OmegaConf.merge(several, {"world_size": [2]})).several_ranks == (2,)


def test_a_number_of_ranks_that_is_given_twice_is_asked_about_once() -> None:
    assert PlanSettings(world_size=(2, 4, 2)).several_ranks == (2, 4)
