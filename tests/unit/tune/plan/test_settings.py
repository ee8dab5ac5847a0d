"""The keys of `adaptive_plan`: where the allocator's setting comes from."""

import pytest

from torchtune_adaptive.tune.plan.settings import PlanSettings, allocator_settings, expandable_segments


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
