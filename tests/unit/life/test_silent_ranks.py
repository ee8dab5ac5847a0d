"""What the ranks that are left say of one that is silent, and of the store where they meet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from torchtune_adaptive.errors import RunFinished, RunStopped
from torchtune_adaptive.life import silent_ranks, this_run
from torchtune_adaptive.life.heartbeat import Silent
from torchtune_adaptive.life.silent_ranks import message
from torchtune_adaptive.life.this_run import ThisRun, saved_and_what_next


def test_launchers_are_to_be_ended_only_where_it_is_the_store_that_is_silent() -> None:
    assert message(Silent((), "pid 5 on node0", 60)).endswith(
        "(their launchers may wait for it indefinitely: end those first)"
    )
    assert message(Silent((3,), "x", 60)).endswith(
        "60 s (adaptive.silent_rank_timeout), and the other ranks cannot continue without it"
    )
    assert message(Silent((2, 3), "x", 60)).endswith("without them")


@pytest.mark.parametrize(
    ("newest", "words"),
    [(None, "nothing is saved. To restart: "), (Path("out/step_4"), "last checkpoint: out/step_4. To resume: ")],
)
def test_a_run_goes_on_only_from_what_is_saved(
    newest: Path | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_run, "THIS_RUN", ThisRun(newest=newest))
    assert saved_and_what_next().startswith(words)


@pytest.mark.parametrize(
    ("error", "as_it_should"),
    [
        (None, True),
        (RunFinished("all"), True),
        (RunStopped("all"), True),
        (OSError("here"), False),
        (SystemExit, False),
    ],
)
def test_only_a_rank_that_ends_with_all_others_says_that_it_has_left(
    error: BaseException | None, as_it_should: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    class Heard:
        def __init__(self, *_: object) -> None: ...

        def stop(self, *, as_it_should: bool) -> None:
            ended.append(as_it_should)

    monkeypatch.setattr(silent_ranks, "Heartbeat", Heard)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with suppress(BaseException), silent_ranks.ending_when_a_rank_is_silent(60):
        if error is not None:
            raise error
    assert ended == [as_it_should]
