"""What the start of a run checks: another run in its folder, and a disk that ranks do not share; and resuming on
another number of ranks. tests/recipes/long/test_crash.py resumes on the same ranks.
"""

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks, run_on_ranks
from tests.recipes.long.memory_pressure import number_of
from tests.recipes.running import demo_config, load_ours, run_as_command, train_until
from tests.timeline import read_timeline
from tests.unit.checkpoints.test_resuming import config
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.checkpoints import rank_0, store
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.cli.main import Condition, condition_of
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import ConfigError

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64")


@pytest.mark.smoke
def test_second_run_in_a_folder_names_the_first_and_changes_no_file(tmp_path: Path) -> None:
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    with another_run(out) as first:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        ended = run_as_command(2, "full", tmp_path / "run", *RUN)
        assert [each.status for each in ended] == [1, 1]
        [error] = [line for line in ended[0].output.splitlines() if line.startswith("error")]
        assert str(out) in error
        assert f"process {first.pid} " in error
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    ended = run_as_command(2, "full", tmp_path / "run", *RUN)
    assert [each.status for each in ended] == [0, 0]
    assert condition_of(out)[0] is Condition.FINISHED


@on_ranks(2)
def test_unshared_disk_is_detected_even_after_an_earlier_run(tmp_path: Path) -> None:
    own = tmp_path / f"disk_{dist.get_rank()}"
    (own / ".saving").mkdir(parents=True)  # left by an earlier run
    with pytest.raises(ConfigError, match="rank 1"):
        find_start(read_full_settings(config(own)), "full", ranks=2)


@on_ranks(2)
def test_start_may_take_longer_than_the_timeout_of_the_process_group(tmp_path: Path) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    find = store.find_checkpoints

    def find_slowly(directory: Path) -> Any:
        time.sleep(4)
        return find(directory)

    with mock.patch.object(store, "find_checkpoints", find_slowly), mock.patch.object(rank_0, "MESSAGE_EVERY_S", 0.5):
        find_start(read_full_settings(config(tmp_path)), "full", ranks=2).release()


SAMPLES = 96  # divisible by 1, 2 and 3 ranks without padding
NUMBERED = (
    *(f"dataset.samples={SAMPLES}", "shuffle=True", "seed=1", "epochs=2"),
    *("batch_size=6", "gradient_accumulation_steps=1", "save_every_n_steps=3", "resume_from_checkpoint=auto"),
    "tokenizer.max_seq_len=256",
)


def train_numbered(folder: Path, stop_before: int | None, options: Sequence[str]) -> None:
    """Collective: train, with a file of sample numbers for each rank."""
    recipe = load_ours("full")(demo_config("full", folder, *NUMBERED, *options))
    recipe.setup()
    path = folder / f"numbers-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.jsonl"
    run = recipe.runner.run

    def noting(samples: Sequence[Any], *, step: int, **others: Any) -> Any:
        result = run(samples, step=step, **others)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, [number_of(sample) for sample in samples]]) + "\n")
        return result

    recipe.runner.run = noting
    train_until(recipe, recipe.runner, stop_before)


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        (2, 1, ()),
        (1, 2, ("batch_increase_function=null",)),
        (2, 3, ("adaptive.token_budget=512",)),
        (2, 1, ("batch_increase_function=tests.recipes.stopping.test_starts.two_more",)),
    ],
    ids=["fewer", "more", "dealt", "growing"],
)
def test_another_number_of_ranks_trains_the_steps_of_an_uninterrupted_run(
    tmp_path: Path, before: int, after: int, options: tuple[str, ...]
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder, ranks, stop_before in ((whole, before, None), (resumed, before, 5), (resumed, after, None)):
        folder.mkdir(exist_ok=True)
        run_on_ranks(ranks, train_numbered, folder, stop_before, options, timeout_s=120, in_group=False)
    expected, found = steps_of(whole, before), steps_of(resumed, after)
    assert {step: expected[step] for step in found} == found
    assert {*expected} - {*found} == {1, 2, 3}
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)


def two_more(epoch: int, _: int) -> int:
    return 2 * (epoch > 0)


def steps_of(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Return the numbers of the samples of each step that this many ranks have trained, sorted."""
    steps: dict[int, list[int]] = {}
    for path in folder.glob(f"numbers-{ranks}-*.jsonl"):
        for step, found in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            steps[step] = sorted([*steps.get(step, ()), *found])
    return steps


def losses(folder: Path) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in read_timeline(folder / "out").steps}
