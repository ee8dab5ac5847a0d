"""`adaptive.precompute_reference`: once per dataset, on disk, whatever the order of samples and the number of ranks."""

from __future__ import annotations

import logging
import os
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankFailed, free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import SGD, demo_config, load_ours, run_ours
from torchtune_adaptive.demo.dataset import demo_preferences
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.tune.preference import KEPT, REFERENCE
from torchtune_adaptive.tune.reference import TABLE_FILE

BASE = (
    *SGD,
    "optimizer.lr=0.01",
    "tokenizer.max_seq_len=96",
    "dataset.samples=37",
    "batch_size=2",
    "clip_grad_norm=inf",
)
PRECOMPUTED = "adaptive.precompute_reference=True"


def set_up(cfg: Any) -> tuple[list[float], list[str], list[bool]]:
    """Collective: what the pairs come with once the recipe is set up, what was said, and of each reference model that
    was built whether it is gone."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtune_adaptive")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    recipe = load_ours("full_dpo")(cfg)
    built: list[weakref.ref[Any]] = []
    module = recipe.setup.__func__.__globals__
    build = module["build_frozen_model"]
    module["build_frozen_model"] = lambda *args: _noted(build(*args), built)
    recipe.setup()
    module["build_frozen_model"] = build
    kept = torch.stack([recipe.data.dataset[index][KEPT] for index in range(len(recipe.data.dataset))])
    recipe.cleanup()
    logger.removeHandler(handler)
    return kept.flatten().tolist(), [line for line in said if "log-probabilities" in line], [r() is None for r in built]


def _noted(model: Any, built: list[weakref.ref[Any]]) -> Any:
    built.append(weakref.ref(model))
    return model


def runs(folder: Path, ports: list[int]) -> list[tuple[list[float], list[str], list[bool]]]:
    """Collective: the table is made, taken, torn, then of another dataset, then cannot be read."""
    table, found = folder / "run" / "out" / TABLE_FILE, []
    rank, free = int(os.environ["RANK"]), iter(ports)

    def once(*overrides: str) -> None:
        os.environ["MASTER_PORT"] = str(next(free))
        found.append(set_up(demo_config("full_dpo", folder / "run", *BASE, PRECOMPUTED, *overrides)))

    once()
    once("seed=3")
    if rank == 0:
        table.write_bytes(table.read_bytes()[:-5])
    once()
    once("dataset.seed=1")
    once()
    os.environ["MASTER_PORT"] = str(next(free))
    run_ours("full_dpo", demo_config("full_dpo", folder / "plain", *BASE))
    os.environ["MASTER_PORT"] = str(next(free))
    run_ours("full_dpo", demo_config("full_dpo", folder / "trained", *BASE, PRECOMPUTED, "adaptive.token_budget=300"))
    return found


def test_it_is_asked_once_and_anew_where_the_file_is_torn_or_another_s(tmp_path: Path) -> None:
    (made, taken, torn, foreign, again), _ = run_on_ranks(
        2, runs, tmp_path, free_ports(7), timeout_s=150, in_group=False
    )
    begun, kept = made[1]
    assert begun == f"{REFERENCE} · computing them for 37 pairs, once before training"
    table = re.escape(str(tmp_path / "run" / "out" / TABLE_FILE))
    assert re.fullmatch(rf"{REFERENCE} · computed for 37 pairs in \d+\.\d s, saved to {table}", kept)
    assert len(made[0]) == 2 * 37
    assert np.std(made[0]) > 1
    assert [line.split(" · ")[1].split(" ")[0] for line in taken[1]] == ["reused"]
    assert taken[0] == made[0]
    assert "it is damaged" in torn[1][0]
    assert torn[0] == pytest.approx(made[0], rel=1e-6)
    assert "was made with a different" in foreign[1][0]
    assert foreign[0] != made[0]
    assert "was made with a different" in again[1][0]
    assert all(all(gone) for _, _, gone in (made, taken, torn, foreign, again))
    assert [len(gone) for _, _, gone in (made, taken, torn)] == [1, 0, 1]
    plain, trained = (read_log(tmp_path / each / "log.jsonl") for each in ("plain", "trained"))
    assert len(plain) == len(trained) == 4
    for expected, ours in zip(plain, trained, strict=True):
        assert "reference_microbatches" not in ours
        for figure in ("loss", "grad_norm", "rewards/chosen", "rewards/rejected"):
            assert ours[figure] == pytest.approx(expected[figure], rel=5e-5, abs=1e-5), figure


def alone(folder: Path) -> list[float]:
    return set_up(demo_config("full_dpo", folder, *BASE, PRECOMPUTED))[0]


def test_one_process_finds_what_three_ranks_find(tmp_path: Path) -> None:
    one = run_on_ranks(1, alone, tmp_path / "one", timeout_s=60, in_group=False)[0]
    for three in run_on_ranks(3, alone, tmp_path / "three", timeout_s=90, in_group=False):
        assert three == pytest.approx(one, rel=1e-5)


class Shifted:
    """Each pair in the place of another, once so many places are set."""

    places = 0

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[(index + self.places) % len(self)]


def shifted(tokenizer: DemoTokenizer, **options: Any) -> Shifted:
    """Component for a config's `dataset:`."""
    return Shifted(demo_preferences(tokenizer, **options))


def change_data(folder: Path) -> None:
    """Collective: after the table is made, the dataset changes."""
    dataset = f"dataset._component_={__name__}.shifted"
    recipe = load_ours("lora_dpo")(demo_config("lora_dpo", folder, *BASE, PRECOMPUTED, dataset))
    recipe.setup()
    Shifted.places = 1
    recipe.train()


def test_a_pair_that_has_changed_since_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"sample \d+ of the dataset has changed since .*log_probs.pt was written"):
        run_on_ranks(1, change_data, tmp_path / "run", timeout_s=60, in_group=False)


def finetune(folder: Path) -> None:
    run_ours("full", demo_config("full", folder, PRECOMPUTED))


def test_finetuning_has_no_reference(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="precompute_reference is True, but finetuning has no reference"):
        run_on_ranks(1, finetune, tmp_path / "run", timeout_s=60, in_group=False)
