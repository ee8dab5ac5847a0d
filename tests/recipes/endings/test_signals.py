"""A run that receives a signal saves, prints one line, and resumes bitwise."""

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.recipes import signal_runs
from tests.recipes.running import saved_weights
from tests.recipes.signal_runs import SignalPlan, run_with_signals
from torchtune_adaptive.cli.status import Condition, condition_of
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
EPOCHS = 2
RUN = (
    f"epochs={EPOCHS}",
    "dataset.samples=32",
    "tokenizer.max_seq_len=96",
    "resume_from_checkpoint=auto",
    "shuffle=True",
    "clip_grad_norm=1.0",
)
STEPS = {1: 8, 2: 4}
SEARCHED = ("use_maximum_batch_size=True", "adaptive.memory_limit=64MiB", "adaptive.max_batch_size=4")
TO_GO_ON = re.compile(r"^SIG\w+(?: on rank \d)?: (.*)\. To (?:resume|restart): (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """Final weights by number of ranks."""
    found = {}
    for ranks in STEPS:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        assert {each.status for each in run_with_signals(ranks, "full", folder, *RUN)} == {0}
        found[ranks] = saved_weights(folder, EPOCHS - 1)
    return found


def named_end(lines: str) -> str:
    """Return the message about the end of the run; check that it is printed once with the resume command."""
    found = TO_GO_ON.findall(lines)
    assert len(found) == 1, lines
    text, command = found[0]
    assert command.endswith("resume_from_checkpoint=auto"), command
    return str(text)


def condition(folder: Path) -> Condition:
    """Return the condition that `tune-adaptive status` reports."""
    return condition_of(folder / "out")[0]


LAST_LINE = re.compile(r"(trained(?: from step \d+)?|so far): loss [\d.]+ -> [\d.]+, checkpoints in ")


def assert_resumes(folder: Path, ranks: int, undisturbed: dict[int, dict[str, torch.Tensor]], after: int) -> None:
    again = run_with_signals(ranks, "full", folder, *RUN)
    assert [each.status for each in again] == [0] * ranks, again
    assert LAST_LINE.findall(again[0].lines) == [f"trained from step {after + 1}"], again[0].lines
    weights, theirs = saved_weights(folder, EPOCHS - 1), undisturbed[ranks]
    assert [name for name in theirs if not torch.equal(weights[name], theirs[name])] == []
    assert [path.name for path in (folder / "out").glob(".*")] == [LOCK_FILE]
    assert condition(folder) is Condition.FINISHED


@pytest.mark.smoke("rank-1-of-2")
@pytest.mark.parametrize(
    ("ranks", "blow", "step"),
    [
        pytest.param(1, SignalPlan(4, signals=(INT, INT)), 4, id="end-of-an-epoch,-Ctrl-C-twice"),
        pytest.param(2, SignalPlan(1, ranks=(1,), signals=(HUP,)), 1, id="rank-1-of-2"),
    ],
)
def test_signal_saves_the_current_step(
    ranks: int, blow: SignalPlan, step: int, tmp_path: Path, undisturbed: dict[int, dict[str, torch.Tensor]]
) -> None:
    ended = run_with_signals(ranks, "full", tmp_path / "run", *RUN, blow=blow)
    assert [each.status for each in ended] == [0] * ranks
    steps_per_epoch = STEPS[ranks] // EPOCHS
    name = f"epoch_{step // steps_per_epoch - 1}" if step % steps_per_epoch == 0 else f"step_{step}"
    place = tmp_path / "run" / "out" / name
    by = f"{blow.signals[0].name}{'' if 0 in blow.ranks else ' on rank 1'}: stopped after"
    assert by in ended[0].lines
    assert named_end(ended[0].lines) == f"stopped after step {step}; last checkpoint: {place}"
    assert place.is_dir()
    assert all(not TO_GO_ON.search(each.lines) for each in ended[1:])
    notices = [
        line
        for each in ended
        for line in each.lines.splitlines()
        if "the run saves a checkpoint after this step" in line
    ]
    assert len(notices) == (0 in blow.ranks)
    assert condition(tmp_path / "run") is Condition.CAN_CONTINUE
    assert_resumes(tmp_path / "run", ranks, undisturbed, after=step)


@pytest.mark.parametrize("blow", [SignalPlan(8), SignalPlan(signal_runs.SAVE, skip=1)], ids=["step", "save"])
def test_signal_in_the_last_step_or_its_save_lets_the_run_finish(blow: SignalPlan, tmp_path: Path) -> None:
    ended = run_with_signals(1, "full", tmp_path / "run", *RUN, blow=blow)
    assert ended[0].status == 0
    assert not TO_GO_ON.search(ended[0].lines)
    assert "SIGTERM: " in ended[0].lines
    assert (tmp_path / "run" / "out" / f"epoch_{EPOCHS - 1}").is_dir()
    again = run_with_signals(1, "full", tmp_path / "run", *RUN)
    assert "nothing left to train" in again[0].lines


@pytest.mark.parametrize(
    ("moment", "where", "ranks"),
    [(signal_runs.LOADING, "during setup", (0,)), (signal_runs.SEARCH, "during the search", (1,))],
)
def test_signal_before_the_first_step_reports_that_no_checkpoint_exists(
    moment: str, where: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    ended = run_with_signals(2, "full", tmp_path / "run", *RUN, *SEARCHED, blow=SignalPlan(moment, ranks))
    assert [each.status for each in ended] == [0, 0]
    assert named_end(ended[0].lines) == f"stopped {where}, before the first step; nothing is saved"
    assert not list((tmp_path / "run" / "out").glob("*_[0-9]"))
    assert condition(tmp_path / "run") is Condition.CAN_CONTINUE
