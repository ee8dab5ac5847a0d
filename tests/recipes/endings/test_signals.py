"""A run that receives a signal saves, prints one line, and resumes bitwise."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.recipes.running import run_as_command, saved_weights
from torchtune_adaptive.cli.status import Condition, condition_of
from torchtune_adaptive.engine.probes import Prober
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
RUN = (
    *("epochs=2", "dataset.samples=32", "tokenizer.max_seq_len=96", "shuffle=True", "clip_grad_norm=1.0"),
    "resume_from_checkpoint=auto",
)
SEARCHED = ("use_maximum_batch_size=True", "adaptive.memory_limit=64MiB", "adaptive.max_batch_size=4")
END = re.compile(r"^SIG\w+(?: on rank \d)?: stopped (.*); (?:last checkpoint: (.*)|.*)\. To (resume|restart): ", re.M)
LOADING, PROBE = (FullModelTorchTuneCheckpointer, "load_checkpoint"), (Prober, "exchange")
SAVE, STEP = (FullModelTorchTuneCheckpointer, "save_checkpoint"), (StepRunner, "run")


@dataclass(frozen=True)
class Blow:
    """A signal before a call of a method, on one rank."""

    at: tuple[type, str]
    call: int
    """The number of the call, from 1."""
    rank: int = 0
    signals: tuple[signal.Signals, ...] = (TERM,)
    """Sent one right after the other."""

    @contextmanager
    def falls(self) -> Iterator[None]:
        owner, name = self.at
        function, calls = getattr(owner, name), count(1)

        def struck(*args: Any, **options: Any) -> Any:
            if next(calls) == self.call and int(os.environ["RANK"]) == self.rank:
                for number in self.signals:
                    os.kill(os.getpid(), number)
                time.sleep(0.3)  # give the signal thread time to run
            return function(*args, **options)

        with mock.patch.object(owner, name, struck):
            yield


CASES = {
    "end of an epoch, Ctrl-C twice": (1, (), Blow(STEP, 4, signals=(INT, INT)), "after step 4", "epoch_0"),
    "rank 1 of 2": (2, (), Blow(STEP, 1, rank=1, signals=(HUP,)), "after step 1", "step_1"),
    "last step": (1, (), Blow(STEP, 8), None, "epoch_1"),
    "last save": (1, (), Blow(SAVE, 2), None, "epoch_1"),
    "loading": (2, SEARCHED, Blow(LOADING, 1), "during setup", None),
    "search": (2, SEARCHED, Blow(PROBE, 1, rank=1), "during the search", None),
}
"""Ranks, overrides, the signal, where the run says that it stopped (None: it finishes), and its newest checkpoint."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """Final weights by number of ranks."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        assert {each.status for each in run_as_command(ranks, "full", folder, *RUN)} == {0}
        found[ranks] = saved_weights(folder, 1)
    return found


@pytest.mark.smoke("rank 1 of 2")
@pytest.mark.parametrize("case", CASES)
def test_run_saves_its_step_after_a_signal_and_resumes_like_an_undisturbed_run(
    case: str, tmp_path: Path, undisturbed: dict[int, dict[str, torch.Tensor]]
) -> None:
    (ranks, overrides, blow, where, newest), folder = CASES[case], tmp_path / "run"
    first, *others = run_as_command(ranks, "full", folder, *RUN, *overrides, around=blow.falls)
    assert {each.status for each in (first, *others)} == {0}
    assert all(not END.search(each.output) for each in others), "only rank 0 prints the end"
    ends, condition = END.findall(first.output), condition_of(folder / "out")[0]
    if where is None:
        assert (ends, condition) == ([], Condition.FINISHED)
    else:
        [(named, checkpoint, way)] = ends
        assert named.startswith(where)
        assert checkpoint == (str(folder / "out" / newest) if newest else "")
        assert way == ("resume" if newest else "restart")
        assert condition is Condition.CAN_CONTINUE
    assert [path.name for path in (folder / "out").glob(newest or "*_[0-9]")] == [newest][: newest is not None]
    if newest:
        assert {each.status for each in run_as_command(ranks, "full", folder, *RUN)} == {0}
        weights, theirs = saved_weights(folder, 1), undisturbed[ranks]
        assert [name for name in theirs if not torch.equal(weights[name], theirs[name])] == []
        assert [path.name for path in (folder / "out").glob(".*")] == [LOCK_FILE]
        assert condition_of(folder / "out")[0] is Condition.FINISHED
