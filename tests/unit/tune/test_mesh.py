"""How many replicas, shards and tensor-parallel ranks a config makes of a number of ranks."""

from __future__ import annotations

import pytest

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.process_group import mesh_shape


def shape_of(ranks: int, **dims: int | None) -> tuple[int, int, int]:
    return mesh_shape(Settings(**NEEDED, **dims), ranks)


def test_shards_are_what_is_left() -> None:
    assert shape_of(8) == (1, 8, 1)
    assert shape_of(16, data_parallel_replicate_dim=2) == (2, 8, 1)
    assert shape_of(8, data_parallel_replicate_dim=8) == (8, 1, 1)
    assert shape_of(8, tensor_parallel_dim=2, data_parallel_shard_dim=None) == (1, 4, 2)
    assert shape_of(16, data_parallel_replicate_dim=2, data_parallel_shard_dim=8) == (2, 8, 1)


@pytest.mark.parametrize(
    ("ranks", "dims", "told"),
    [
        (6, {"data_parallel_replicate_dim": 4}, "data_parallel_replicate_dim is 4, but the world size is 6"),
        (2, {"data_parallel_replicate_dim": 4}, "data_parallel_replicate_dim is 4, but the world size is 2"),
        (2, {"data_parallel_shard_dim": 1}, "data_parallel_shard_dim is 1, but the world size is 2"),
        (8, {"data_parallel_shard_dim": 4}, "data_parallel_shard_dim is 4, but the world size is 8"),
        (
            16,
            {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 4},
            "data_parallel_replicate_dim is 2 × data_parallel_shard_dim is 4, but the world size is 16",
        ),
        (3, {"tensor_parallel_dim": 2}, "tensor_parallel_dim is 2, but the world size is 3"),
    ],
)
def test_what_does_not_come_out_even_is_told_with_its_keys(ranks: int, dims: dict[str, int], told: str) -> None:
    with pytest.raises(
        ConfigError, match="must equal it; -1 for data_parallel_shard_dim means all remaining ranks"
    ) as raised:
        shape_of(ranks, **dims)
    assert told in str(raised.value)
