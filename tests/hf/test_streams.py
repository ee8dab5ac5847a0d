"""Streams that end in the middle of a step, with and without the mixin."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.utils.data import IterableDataset

from tests.hf.trainers import Counting, arguments, difference, train, use_fsdp2
from tests.ranks import run_on_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.hf import AdaptiveArguments

pytestmark = pytest.mark.timeout(300)


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return islice(Counting(), self.samples)


def compare(folder: Path, sharded: bool = False) -> list[float]:
    """Collective: the differences from stock, in the same microbatches and after a failure in a leftover batch."""
    if sharded:
        use_fsdp2()
    settings = arguments(folder, accelerator_config={"dispatch_batches": False})
    stream: dict[str, Any] = {"train_dataset": Stream(26), "arguments": settings}
    stock = train(folder, **stream)
    same = train(folder, AdaptiveArguments(), **stream)
    failed = train(folder, AdaptiveArguments(), faults=[(3, 40)], **stream)
    assert failed.column("oom_recoveries")[-1] == 2  # in the batch left over, and in the step that it is added to
    return [difference(same, stock), difference(failed, stock)]


def test_a_stream_that_ends_within_a_step_trains_what_stock_trains(tmp_path: Path) -> None:
    assert max(compare(tmp_path)) < 1e-6


@pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2", "DDP"])
def test_two_ranks_on_a_stream_that_ends_within_a_step_train_what_stock_trains(sharded: bool, tmp_path: Path) -> None:
    for differences in run_on_ranks(2, compare, tmp_path, sharded, in_group=False, timeout_s=60):
        assert max(differences) < 1e-6


def test_a_stream_without_enough_samples_for_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        train(tmp_path, AdaptiveArguments(), train_dataset=Stream(8), arguments=arguments(tmp_path))
