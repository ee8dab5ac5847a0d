"""Squared norms of microbatch gradients, measured in FSDP's reduce-scatter, compared with one process."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import ModelConfig, build, runner_of, samples_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.noise import Squares
from torchtune_adaptive.errors import RecoveryUnsupportedError
from torchtune_adaptive.testing import FaultInjector

SAMPLES = 12


def squares_of(config: ModelConfig, samples: Sequence[Tensor], rows: int, operation: int | None = None) -> Squares:
    runner = runner_of(build(config), rows)
    runner.measure_noise(1)
    with FaultInjector(runner) as faults:
        if operation is not None:
            faults.fail_at(rank=1, step=1, operation=operation)
        result = runner.run(samples, step=1)
    assert result.recoveries == (operation is not None)
    assert result.squares is not None
    return result.squares


def on_a_rank(config: ModelConfig, rows: int, operation: int | None) -> Squares:
    """Collective: split the samples among the ranks in order."""
    share = SAMPLES // dist.get_world_size()
    mine = samples_of(0, SAMPLES, longest=20)[dist.get_rank() * share :][:share]
    return squares_of(config, mine, rows, operation)


@pytest.mark.parametrize(
    ("config", "ranks", "rows", "operation"),
    [
        (ModelConfig(dropout=0.0), 2, 2, None),
        (ModelConfig(dropout=0.0), 3, 2, None),
        (ModelConfig(dropout=0.0, lora=True, checkpointing="full"), 2, 3, None),
        (ModelConfig(dropout=0.0, replicas=2), 4, 1, None),
        (ModelConfig(dropout=0.0), 2, 4, 200),
        (ModelConfig(dropout=0.0, sharded=False), 2, 2, None),
    ],
    ids=["2 ranks", "3 ranks", "LoRA, checkpointed", "2 replicas of 2 shards", "out of memory", "whole models"],
)
def test_ranks_measure_the_noise_of_one_process(
    config: ModelConfig, ranks: int, rows: int, operation: int | None
) -> None:
    measured = run_on_ranks(ranks, on_a_rank, config, rows, operation, timeout_s=60)
    after = rows if operation is None else rows // 2
    alone = squares_of(
        ModelConfig(dropout=0.0, sharded=False, lora=config.lora), samples_of(0, SAMPLES, longest=20), after
    )
    for squares in measured:
        assert squares == pytest.approx(alone, rel=1e-4)
        assert squares.all_samples == SAMPLES


def ask_for_the_noise_of_replicas() -> None:
    model = nn.Linear(4, 4)
    replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    with pytest.raises(RecoveryUnsupportedError, match="the noise of gradients is measured where FSDP scatters them"):
        runner_of(model, 1).measure_noise(1)


def test_noise_of_unsharded_replicas_is_refused() -> None:
    run_on_ranks(2, ask_for_the_noise_of_replicas)
