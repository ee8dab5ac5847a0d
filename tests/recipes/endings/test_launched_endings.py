"""How a run of several ranks ends: Ctrl-C, an error on one rank, a killed launcher."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.recipes.running import assert_only_torchruns_report_follows
from tests.recipes.terminal import STARTS_S, Started, run_in_terminal
from tests.scheduling_delays import SchedulingDelays
from torchtune_adaptive.cli.status import Condition, condition_of
from torchtune_adaptive.lifecycle.signals import ONE_SIGNAL_S

FULL = "adaptive_full_finetune_distributed"
LONG = ("dataset.samples=100000", "use_maximum_batch_size=False", "adaptive=null", "output_dir=out")
TRAINS = re.compile(r"loss \d")
RAISES = """
import time
import torch.distributed as dist
from pathlib import Path
from torchtune_adaptive.demo.tokenizer import DemoTokenizer

def tokenizer(max_seq_len, ranks):
    dist.barrier()
    if dist.get_rank() in ranks:
        Path(f"raised_{dist.get_rank()}").write_text(str(time.time()))
        raise FileNotFoundError("this machine has no such file")
    return DemoTokenizer(max_seq_len)
"""
SLOW = """
import time
from pathlib import Path
from torchtune_adaptive.demo.dataset import demo_dataset

class Slow:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if Path("hold").exists():
            Path("held").touch()
            time.sleep(60)
        return self.samples[index]

def slow(tokenizer, **options):
    return Slow(demo_dataset(tokenizer, **options))
"""


def tune_run_in_a_terminal(ranks: int, folder: Path, *overrides: str) -> AbstractContextManager[Started]:
    command = ["--nproc_per_node", str(ranks), FULL, "--config", "adaptive/demo/full", *overrides]
    return run_in_terminal(folder, command)


@contextmanager
def in_an_endless_step(folder: Path) -> Iterator[Started]:
    """Run until the third step on two ranks, with step 2 saved."""
    (folder / "slow.py").write_text(SLOW)
    overrides = (*LONG, "dataset._component_=slow.slow", "save_every_n_steps=2")
    with tune_run_in_a_terminal(2, folder, *overrides) as run:
        run.when(lambda: "step_2 saved in" in run.output, STARTS_S)
        (folder / "hold").touch()
        run.when((folder / "held").exists, 60)
        yield run


def test_ctrl_c_saves_and_prints_one_line(tmp_path: Path) -> None:
    with tune_run_in_a_terminal(2, tmp_path, *LONG) as run:
        run.when(lambda: TRAINS.search(run.output), STARTS_S)
        os.killpg(run.process.pid, signal.SIGINT)
        status = run.process.wait(60)
    text = re.findall(
        r"^(SIGINT: stopped after step (\d+); last checkpoint: (.*)\. To resume: .*)$", run.output, re.MULTILINE
    )
    assert len(text) == 1, run.output
    line, step, saved = text[0]
    assert saved == str(tmp_path / "out" / f"step_{step}")
    assert (tmp_path / "out" / f"step_{step}" / "adaptive_checkpoint.json").is_file()
    assert "KeyboardInterrupt" not in run.output, run.output
    assert status == 1
    ours, _, torchruns = run.output.partition("Traceback (most recent call last)")
    assert line in ours
    assert re.search(r"SignalException: Process \d+ got signal: 2$", torchruns), run.output


@pytest.mark.smoke("2-failing0")
@pytest.mark.parametrize(("ranks", "failing"), [(2, [1]), (3, [1, 2])])
def test_first_error_message_is_printed_once_within_two_seconds(ranks: int, failing: list[int], tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    overrides = ("tokenizer=raises.tokenizer", f"tokenizer.ranks={failing}".replace(" ", ""))
    with SchedulingDelays() as delays, tune_run_in_a_terminal(ranks, tmp_path, *LONG, *overrides) as run:
        assert run.process.wait(STARTS_S) == 1
        run.when(lambda: "this machine has no such file" in run.output, 10)
    raised = min(float(path.read_text()) for path in tmp_path.glob("raised_*"))
    text = [(moment, line) for moment, line in run.lines if line.startswith("error")]
    assert len(text) == 1, run.output
    assert re.match(rf"error \(rank [{failing[0]}-{failing[-1]}]\): tokenizer could not be built", text[0][1])
    # the rank, the launcher and this process may all have been delayed
    assert text[0][0] - raised < 2.0 + 3 * delays.between(raised, text[0][0])
    assert_only_torchruns_report_follows(text[0][1], run.output)


def last_time(folder: Path) -> str:
    condition, lines = condition_of(folder / "out")
    assert condition is Condition.CAN_CONTINUE
    return next(line for line in lines if line.startswith("last time: "))


def test_second_signal_through_the_launcher_ends_all_ranks_immediately(tmp_path: Path) -> None:
    with in_an_endless_step(tmp_path) as run:
        os.kill(run.process.pid, signal.SIGTERM)
        run.when(lambda: "SIGTERM: " in run.output, 20)
        time.sleep(2 * ONE_SIGNAL_S)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(20) == 1
        run.when(lambda: "got signal" in run.output, 10)
        assert run.ranks() == []
    newest = re.findall(r"checkpoint (\S+) saved in", run.output)[-1]
    again = (
        f"SIGTERM, the second signal: ended immediately; last checkpoint: {newest}, and all training since then is lost"
    )
    assert run.output.count(again) == 1, run.output
    assert last_time(tmp_path) == f"last time: {again}"
