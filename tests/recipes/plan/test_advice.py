"""What `adaptive_plan` advises starts as it is printed, and needs what was said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.recipes.plan.test_plan import ON_GPU, ask
from tests.recipes.running import demo_config, start_here
from torchtune_adaptive.errors import AdaptiveError, OneRowDoesNotFitError
from torchtune_adaptive.prediction.capacity import Budget
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.tune.plan import advice
from torchtune_adaptive.tune.plan.advice import Alternatives, what_fits, what_is_fastest
from torchtune_adaptive.tune.plan.capacities import Capacities, predict
from torchtune_adaptive.tune.plan.overrides import Overrides, changed
from torchtune_adaptive.tune.plan.question import PlanSettings

TOKENS = 256
TOO_LITTLE = 11 * 2**20
"""For one row of the demo as it is, which needs 14 MiB, and enough with checkpointing."""


def train(tmp_path: Path, limit: str, *overrides: str) -> None:
    """One step of the longest samples on one process, under this limit, which nothing recovers from."""
    start_here(
        "full",
        "--config",
        "adaptive/demo/full",
        f"output_dir={tmp_path / 'out'}",
        f"checkpointer.checkpoint_dir={tmp_path / 'weights'}",
        "use_maximum_batch_size=False",
        "adaptive.recover_from_oom=False",
        f"adaptive.memory_limit={limit}",
        f"tokenizer.max_seq_len={TOKENS}",
        "dataset.packed=True",
        "max_steps_per_epoch=1",
        "epochs=1",
        *overrides,
        train=True,
    )


def test_a_line_of_advice_starts_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", f"memory_limit={TOO_LITTLE}B")
    output = capsys.readouterr().out
    assert "does not fit in 11.0 MiB: one row of 256 tokens needs 13.9 MiB" in output
    assert re.search(
        r"^measure the first with: tune run .* enable_activation_checkpointing=True batch_size=1 ", output, re.M
    )
    lines = re.findall(r"^  (\S+=.*\S) +fits (\d) rows? +about (\d\.\d\d) × the time of a step$", output, re.MULTILINE)
    ((overrides, rows, slowdown),) = [each for each in lines if "rank" not in each[0]]
    assert "enable_activation_checkpointing=True" in overrides.split()
    assert rows == "1"
    assert 1.1 < float(slowdown) < 1.4
    train(tmp_path, f"{TOO_LITTLE}B", *overrides.split())
    with pytest.raises((AdaptiveError, torch.OutOfMemoryError)):
        train(tmp_path, f"{TOO_LITTLE}B", "batch_size=1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"),
        ("enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2"),
    ],
)
def test_other_lines_start_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: Overrides) -> None:
    # what Inductor writes for CPUs takes half a minute to compile, and nothing is compiled beneath a meter of memory
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    train(tmp_path, "64MiB", *overrides)
    assert (tmp_path / "out" / "epoch_0").is_dir()


def alternatives(tmp_path: Path, limit: str, *overrides: str) -> Alternatives:
    cfg = demo_config("full", tmp_path / "run", *ON_GPU, *overrides)
    plan = PlanSettings(world_size=2, memory_limit=limit, memory_overhead=0, sequence_length=512)
    return Alternatives(cfg, plan, predict(cfg, plan, lambda: None), 0, lambda: None)


class Told:
    """Alternatives of which only those fit that have one of these, and which nobody traces."""

    def __init__(self, cfg: OmegaConf, others: Alternatives, *enough: str) -> None:
        self.cfg, self.plan, self.as_it_is = others.cfg, others.plan, others.as_it_is
        self.asked: list[tuple[Overrides, int]] = []
        self._enough = enough

    def outcome(self, overrides: Overrides, ranks: int | None = None) -> Outcome:
        self.asked.append((overrides, ranks or self.plan.ranks))
        fits = any(each in overrides for each in self._enough)
        return Outcome(" ".join(overrides), ranks or 2, 512, int(fits), 10, 10)


def test_single_changes_are_tried_first_and_together_only_where_none_is_enough(tmp_path: Path) -> None:
    others = alternatives(tmp_path, "8MiB")
    enough = Told(others.cfg, others, "enable_activation_checkpointing=True")
    told = what_fits(enough)  # type: ignore[arg-type]
    assert {each.name for each in told} == {
        "enable_activation_checkpointing=True",
        "enable_activation_checkpointing=True enable_activation_offloading=True",
    }
    assert ((), 4) in enough.asked, "more ranks"
    assert ("compile=True", "enable_activation_checkpointing=True") not in [each for each, _ in enough.asked]
    nothing = Told(others.cfg, others)
    assert what_fits(nothing) == []  # type: ignore[arg-type]
    assert ("compile=True", "enable_activation_checkpointing=True") in [each for each, _ in nothing.asked]
    assert [ranks for each, ranks in nothing.asked if each == ()] == [4, 8, 16]


def test_what_saves_most_is_tried_on_more_ranks_too(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "memory_limit=9MiB", "sequence_length=512")
    output = capsys.readouterr().out
    assert re.search(r"^  enable_activation_checkpointing=True batch_size=1  \(on 8 ranks\) +fits 1 row", output, re.M)
    assert "measure the first with: tune run --nproc_per_node 8 " in output


def test_where_weights_alone_are_too_much_only_what_makes_them_smaller_is_tried(tmp_path: Path) -> None:
    others = alternatives(tmp_path, "1MiB")
    nothing = Told(others.cfg, others)
    what_fits(nothing)  # type: ignore[arg-type]
    assert ("enable_activation_checkpointing=True",) not in [each for each, _ in nothing.asked]
    assert ("fsdp_cpu_offload=True",) in [each for each, _ in nothing.asked]


def test_what_is_not_traced_to_its_end_would_not_have_fitted(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path / "run", *ON_GPU, "model.max_seq_len=4096")

    def asked(limit_bytes: int, traced: Callable[[], None] = lambda: None) -> Capacities:
        plan = PlanSettings(world_size=2, memory_limit=f"{limit_bytes}B", memory_overhead=0, sequence_length=4096)
        return predict(cfg, plan, traced, check=False, if_it_fits=True)

    answer = asked(2**40).capacities[0]
    one_row = answer.peak(1)
    without_activations, whole = one_row.phase_bytes["optimizer state"], one_row.peak_bytes or 0
    assert whole > 2.5 * without_activations
    for limit_bytes, traces in ((without_activations, 0), (whole // 2, 1), (whole * 98 // 100, 1)):
        told: list[None] = []
        with pytest.raises(OneRowDoesNotFitError) as refused:
            asked(limit_bytes, lambda told=told: told.append(None))
        assert len(told) == traces
        assert answer.within(Budget(limit_bytes, 0)).most_rows_with_retries == 0
        assert limit_bytes < refused.value.need_bytes <= whole
    fitting = asked(answer.reserved_bytes(1)).capacities[0]
    assert fitting.most_rows == 1


def test_what_cannot_be_predicted_is_named_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = alternatives(tmp_path, "1GiB", "adaptive.memory_limit=[1GiB,1GiB]")
    others.plan = replace(others.plan, memory_limit=None)
    assert others.outcome((), 4) is None
    monkeypatch.setattr(advice, "predict", lambda *_, **__: torch.zeros(2) + torch.zeros(3))
    assert others.outcome(("compile=True",)) is None
    ranks, broken = others.notes()
    assert ranks.startswith(
        "not predicted: on 4 ranks (ConfigError: adaptive.memory_limit has 2 amounts and world_size"
    )
    assert broken.startswith("not predicted: compile=True (RuntimeError: The size of tensor")


def test_the_fastest_settings_are_what_is_known_of_them(tmp_path: Path) -> None:
    others = alternatives(tmp_path, "1GiB", "device=cpu", "dtype=fp32")
    told = what_is_fastest(others)
    by_name = {each.name: each for each in told}
    checkpointed = by_name["enable_activation_checkpointing=True"]
    assert by_name[""].tokens_per_s > by_name["ac_mode=selective ac_option=2"].tokens_per_s > checkpointed.tokens_per_s
    assert 1.1 < (checkpointed.slowdown or 0) < 1.4
    assert by_name["fsdp_reshard_after_forward=False"].peak_bytes > by_name[""].peak_bytes * 0.99
    cfg = changed(others.cfg, ("enable_activation_checkpointing=True",))
    alone = predict(cfg, others.plan, lambda: None).capacities[0]
    assert checkpointed.rows == alone.chosen_rows
    assert checkpointed.peak_bytes == alone.reserved_bytes(alone.chosen_rows)


def test_eight_bit_states_are_predicted_with_the_kernels_that_they_compile(tmp_path: Path) -> None:
    others = alternatives(tmp_path, "1GiB")
    first = others.found.capacities[0].peak(4).phase_bytes
    eight = ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused")
    checked = predict(changed(others.cfg, eight), others.plan, lambda: None)
    assert abs(checked.largest_error) < 0.005
    states = first["optimizer state"] - first["weights"]
    in_8_bits = checked.capacities[0].peak(4).phase_bytes["optimizer state"] - first["weights"]
    assert 0.5 * states <= in_8_bits < 0.62 * states, "one byte in place of the two of bf16, but for small tensors"


def test_several_numbers_of_ranks_are_answered_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "world_size=[1,2]", "memory_limit=64MiB")
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ranks", "tokens", "rows", "reserved", "tokens/s", "between"]
    one, two = (line.split() for line in lines if line.startswith("  "))
    assert (one[0], two[0]) == ("1", "2")
    assert float(two[5]) > 1.5 * float(one[5])
