"""What the start of a run checks: another run in its folder, and a disk that ranks do not share; and resuming on
another number of ranks. tests/recipes/long/test_crash.py resumes on the same ranks.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.long.memory_pressure import number_of
from tests.recipes.running import demo_config, load_ours, run_as_command, train_until
from tests.unit.checkpoints.test_resuming import config
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.cli.status import Condition, condition_of
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


def start_on_a_separate_disk(folder: Path) -> str:
    own = folder / f"disk_{dist.get_rank()}"
    (own / ".saving").mkdir(parents=True)  # left by an earlier run
    with pytest.raises(ConfigError) as error:
        find_start(read_full_settings(config(own)), "full")
    return str(error.value)


def test_unshared_disk_is_detected_even_after_an_earlier_run(tmp_path: Path) -> None:
    for message in run_on_ranks(2, start_on_a_separate_disk, tmp_path):
        assert "rank 1" in message


SAMPLES = 96  # divisible by 1, 2 and 3 ranks without padding
NUMBERED = (
    *(f"dataset.samples={SAMPLES}", "shuffle=True", "seed=1", "epochs=2"),
    *("batch_size=2", "gradient_accumulation_steps=1", "save_every_n_steps=5", "resume_from_checkpoint=auto"),
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


@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (3, ("adaptive.token_budget=512",))], ids=["rows", "dealt"])
def test_another_number_of_ranks_trains_the_rest_of_the_epoch_once(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_on_ranks(2, train_numbered, folder, 13, options, timeout_s=120, in_group=False)
    run_on_ranks(ranks, train_numbered, folder, None, options, timeout_s=120, in_group=False)
    before, after = numbers(folder, 2), numbers(folder, ranks)
    first = Counter(number for step, found in before if step <= 10 for number in found)
    epoch_ends = 10 + (SAMPLES - 40) // (2 * ranks)
    first.update(number for step, found in after if step <= epoch_ends for number in found)
    assert max(first.values()) == 1
    assert len(first) == 40 + (SAMPLES - 40) // (2 * ranks) * 2 * ranks
    second = Counter(number for step, found in after if step > epoch_ends for number in found)
    assert max(second.values()) == 1
    assert len(second) == SAMPLES // (2 * ranks) * 2 * ranks


def numbers(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    """Return the samples of each step, of all ranks in order."""
    files = [path.read_text(encoding="utf-8") for path in folder.glob(f"numbers-{ranks}-*.jsonl")]
    return [(step, found) for step, found in (json.loads(line) for file in files for line in file.splitlines())]
