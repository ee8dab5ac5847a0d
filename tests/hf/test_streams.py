"""Compare streams that end in the middle of a step, with and without the mixin."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from tests.hf.trainers import Counting, Means, Run, arguments, difference, train, use_fsdp2
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


def test_stream_that_ends_within_a_step_trains_like_stock(tmp_path: Path) -> None:
    assert max(compare(tmp_path)) < 1e-6


@pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2", "DDP"])
def test_two_ranks_on_a_stream_that_ends_within_a_step_train_like_stock(sharded: bool, tmp_path: Path) -> None:
    for differences in run_on_ranks(2, compare, tmp_path, sharded, in_group=False, timeout_s=60):
        assert max(differences) < 1e-6


def test_stream_too_short_for_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        train(tmp_path, AdaptiveArguments(), train_dataset=Stream(8), arguments=arguments(tmp_path))


class EndsEpochs(TrainerCallback):
    """Ends the epoch after these batches of the run, which are not the last of their step."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.seen = batches, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen += 1
        control.should_epoch_stop = self.seen in self.batches


@pytest.mark.parametrize("base", [Trainer, Means], ids=["sum", "mean"])
def test_an_epoch_that_a_callback_ends_within_a_step_trains_what_stock_trains(base: type, tmp_path: Path) -> None:
    settings = arguments(tmp_path, max_steps=-1, num_train_epochs=4)
    rows = [list(range(start, start + 20)) for start in range(1, 121)]  # of one length: a mean of means is their mean

    def trained(adaptive: AdaptiveArguments | None, **options: Any) -> Run:
        stops = [EndsEpochs(4, 5, 7)]  # twice before a step is complete
        data = [{"input_ids": row, "labels": row} for row in rows]
        return train(tmp_path, adaptive, base=base, train_dataset=data, callbacks=stops, arguments=settings, **options)

    stock, failed = trained(None), trained(AdaptiveArguments(), faults=[(2, 40)])
    assert failed.column("oom_recoveries")[-1] == 1
    assert difference(trained(AdaptiveArguments()), stock) < 1e-6
    assert difference(failed, stock) < 1e-6
