"""The thread that reports where a script waits."""

import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from tests.rehearse.conftest import Rehearse
from torchtune_adaptive.rehearse import run_script


class Activations:
    """Tensors of a forward pass, which hold memory of the card."""


class Writer:
    steps = 0


class NothingRead:
    zeros = 0


def test_watching_a_waiting_script_does_not_keep_tensors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_script, "SILENT_S", 0.2)
    threading.Thread(target=run_script._report_waiting, args=(Writer(), NothingRead()), daemon=True).start()

    def forward() -> "weakref.ref[Activations]":
        held = Activations()
        for _ in range(200):
            time.sleep(0.01)
            if "no step for" in capsys.readouterr().err:
                break
        else:
            pytest.fail("the thread printed no line")
        return weakref.ref(held)

    assert forward()() is None


def test_compilation_is_named_as_the_cause_while_it_runs_in_forward_or_backward() -> None:
    causes = []

    def compiler(graph: Any, _: object) -> Any:
        causes.append(run_script._cause(0))
        return graph.forward

    function = torch.compile(torch.sin, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    function(torch.ones(2, requires_grad=True)).sum().backward()
    assert [*causes, run_script._cause(0)] == [" (torch.compile is compiling)"] * 2 + [""]


def test_no_cause_is_named_in_a_checkpointed_layer_with_frames_of_dynamo() -> None:
    causes = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        causes.append(run_script._cause(0))
        return 2 * x

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert causes == [""]


READS = """
    import gc, torch
    from torchtune_adaptive.rehearse.device_values import DeviceValues

    (values,) = (each for each in gc.get_objects() if type(each) is DeviceValues)
    loss, rows = torch.ones(3, device="cuda").sum(), torch.tensor([7, 8], device="cuda")
    counts = []
    for read in rows.tolist, rows.sum().item, loss.item, loss.cpu, loss.long().item, (loss > 1).item:
        before = values.zeros
        read()
        counts.append(values.zeros - before)
    print("counts", counts)
"""


def test_card_values_read_as_0_are_counted(rehearse: Rehearse) -> None:
    assert "counts [0, 0, 1, 1, 1, 1]" in rehearse(READS).printed
    assert run_script._cause(3) == " (since then it read 3 numbers from the GPU, all as 0)"
