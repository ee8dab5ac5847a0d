"""Messages about silent ranks, and which ranks report a regular end."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from torchtune_adaptive.errors import RunFinished, RunStopped
from torchtune_adaptive.lifecycle import heartbeat, run_state
from torchtune_adaptive.lifecycle.heartbeat import SilentRanks, exit_if_blocked, exit_on_silent_rank
from torchtune_adaptive.lifecycle.run_state import ThisRun, saved_and_next_command


def test_message_names_ranks_their_location_and_the_processes_to_end_first() -> None:
    assert str(SilentRanks((3,), "pid 7 on node-b", 60)) == (
        "rank 3 (pid 7 on node-b) has not responded for 60 s (adaptive.silent_rank_timeout), "
        "and the other ranks cannot continue"
    )
    assert str(SilentRanks((2, 3), "x", 60)).startswith("ranks 2, 3 (x) have not responded")
    store = str(SilentRanks((), "pid 5 on node0", 60))
    assert store.startswith("the rendezvous store, hosted by rank 0 (pid 5 on node0) or its launcher, has not")
    assert store.endswith("launchers may wait for it indefinitely: end them first")


@pytest.mark.parametrize(
    ("newest", "words"),
    [(None, "nothing is saved. To restart: "), (Path("out/step_4"), "last checkpoint: out/step_4. To resume: ")],
)
def test_resume_command_requires_a_checkpoint(newest: Path | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "THIS_RUN", ThisRun(newest_checkpoint=newest))
    assert saved_and_next_command().startswith(words)


@pytest.mark.parametrize(
    ("error", "normally"),
    [(None, True), (RunFinished("x"), True), (RunStopped("x"), True), (OSError("x"), False), (SystemExit, False)],
)
def test_only_ranks_that_end_with_all_others_report_a_regular_end(
    error: BaseException | None, normally: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    class Heard:
        def __init__(self, *_: object) -> None: ...

        def stop(self, *, normally: bool) -> None:
            ended.append(normally)

    monkeypatch.setattr(heartbeat, "Heartbeat", Heard)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with suppress(BaseException), exit_on_silent_rank(60):
        if error is not None:
            raise error
    assert ended == [normally]


def test_heartbeat_that_waits_for_the_store_does_not_abort_the_exiting_process(monkeypatch: pytest.MonkeyPatch) -> None:
    exits, answered = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", exits.append)
    waiting = threading.Thread(target=answered.wait, name=heartbeat.NAME)
    waiting.start()
    exit_if_blocked(0)
    answered.set()
    waiting.join(10)
    exit_if_blocked(0)
    assert exits == [0]
