"""The thread that says where a script waits."""

import threading
import time
import weakref

import pytest

from torchtune_adaptive.rehearse import run_script


class Activations:
    """What a forward holds, and a card's memory with it."""


class Writer:
    steps = 0


def test_to_look_where_a_script_waits_keeps_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_script, "SILENT_S", 0.2)
    threading.Thread(target=run_script._say_where_it_waits, args=(Writer(),), daemon=True).start()

    def forward() -> "weakref.ref[Activations]":
        held = Activations()
        for _ in range(200):
            time.sleep(0.01)
            if "no step for" in capsys.readouterr().err:
                break
        else:
            pytest.fail("the thread said nothing")
        return weakref.ref(held)

    assert forward()() is None
