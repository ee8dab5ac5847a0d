"""The limit found for each stage of preference training holds for the whole run, not only for its first step."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log, search_results
from tests.recipes.running import demo_config, run_ours
from torchtune_adaptive.tune.preference import POLICY, REFERENCE

TIGHT = (
    "use_maximum_batch_size=True",
    "adaptive.round_to=none",
    "adaptive.sequence_length=128",
    "adaptive.memory_limit=36MiB",
    "dataset._component_=benchmarks.stages.random_pairs",
    "dataset.tokens=128",
    "dataset.samples=192",
    "batch_size=64",
    "gradient_accumulation_steps=1",
)


def train(kind: str, folder: Path, *overrides: str) -> None:
    run_ours(kind, demo_config(kind, folder, *TIGHT, *overrides))


@pytest.mark.smoke
def test_reference_fits_with_optimizer_state_that_the_search_did_not_keep(tmp_path: Path) -> None:
    run_on_ranks(1, train, "full_dpo", tmp_path / "run", timeout_s=60, in_group=False)
    found = search_results(tmp_path / "run" / "out")
    policy, reference = found[POLICY], found[REFERENCE]
    assert policy["rows"] < reference["rows"] < 64
    steps = read_log(tmp_path / "run" / "log.jsonl")
    assert [step["oom_recoveries"] for step in steps] == [0, 0, 0]
