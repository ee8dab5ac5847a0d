"""What `adaptive_plan` advises starts as it is printed, and needs what was said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.recipes.plan.test_plan import ON_GPU, ask
from tests.recipes.running import demo_config, start_here
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.tune.plan.advice import Alternatives, what_fits
from torchtune_adaptive.tune.plan.capacities import predict
from torchtune_adaptive.tune.plan.overrides import Overrides
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
    lines = re.findall(r"^  (\S+=.*\S) +fits (\d) rows? +about (\d\.\d\d) × the step time$", output, re.MULTILINE)
    ((overrides, rows, slowdown),) = [each for each in lines if "rank" not in each[0]]
    assert "enable_activation_checkpointing=True" in overrides.split()
    assert rows == "1"
    assert 1.1 < float(slowdown) < 1.4
    train(tmp_path, f"{TOO_LITTLE}B", *overrides.split())
    with pytest.raises((AdaptiveError, torch.OutOfMemoryError)):
        train(tmp_path, f"{TOO_LITTLE}B", "batch_size=1")


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
