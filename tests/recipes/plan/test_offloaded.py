"""Activations offloaded to the host: torchtune decides what is in flight, so a prediction follows its rules."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.recipes.plan.test_plan import NO_ACCUMULATION, ask
from tests.recipes.running import demo_config
from tests.recipes.tracing import fake_step
from torchtune_adaptive.prediction.law import peak_of, sizes_of

ROWS, TOKENS, WIDTH = 4, 512, 128
INPUT_BYTES = 2 * ROWS * TOKENS * WIDTH
"""What checkpointing keeps of a layer: its input, in bf16."""
IN_FLIGHT = 5
"""torchtune lets so many activations be on their way before it waits for the first of them (max_fwd_stash_size)."""
SETTINGS = ("device=cuda", "dtype=bf16", "enable_activation_checkpointing=True", *NO_ACCUMULATION)


@cache
def over_resident(layers: int, *overrides: str) -> tuple[dict[str, int], set[int], int]:
    """Bytes of each phase beside weights and optimizer state; streams; bytes of weights."""
    sizes = (f"model.num_layers={layers}", f"checkpointer.sizes.num_layers={layers}")
    cfg = demo_config("full", Path("/nowhere/run"), *SETTINGS, *sizes, *overrides)
    with fake_step(cfg, world_size=1) as step:
        recording = step.record(ROWS, TOKENS)
    peaks = peak_of(recording.phases, sizes_of(recording), caches=False).phase_bytes
    resident = peaks["optimizer state"]
    streams = {block.stream for block in recording.blocks}
    return {phase: peak - resident for phase, peak in peaks.items()}, streams, peaks["weights"]


OFFLOADED = "enable_activation_offloading=True"


def test_of_any_number_of_layers_a_few_inputs_are_in_flight() -> None:
    kept, offloaded = over_resident(8)[0], over_resident(8, OFFLOADED)[0]
    assert kept["layers forward"] - offloaded["layers forward"] == (8 - IN_FLIGHT) * INPUT_BYTES
    kept, offloaded = over_resident(16)[0], over_resident(16, OFFLOADED)[0]
    assert kept["layers forward"] - offloaded["layers forward"] == (16 - IN_FLIGHT) * INPUT_BYTES


def test_in_the_backward_only_gradients_grow_with_the_layers() -> None:
    few, _, weights_of_few = over_resident(8, OFFLOADED)
    many, _, weights_of_many = over_resident(16, OFFLOADED)
    gradients = weights_of_many - weights_of_few
    # but for the last layer's input, and buffers of some bytes that count as weights
    assert many["layers backward"] - few["layers backward"] == pytest.approx(gradients, abs=1024)


def test_what_comes_back_is_on_a_stream_of_its_own() -> None:
    assert over_resident(8)[1] == {0}
    assert over_resident(8, OFFLOADED)[1] == {0, 1}


def test_what_is_compiled_is_offloaded_too() -> None:
    """A compiled layer that is checkpointed keeps its input, like any other."""
    kept, offloaded = over_resident(8, "compile=True")[0], over_resident(8, "compile=True", OFFLOADED)[0]
    assert kept["layers forward"] - offloaded["layers forward"] == (8 - IN_FLIGHT) * INPUT_BYTES


def test_the_answer_says_that_activations_are_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", OFFLOADED, *SETTINGS, "memory_limit=8GiB")
    output = capsys.readouterr().out
    assert "activation checkpointing · activation offloading · 256 tokens" in output
    assert "upper bound" not in output
