"""Each trainer of TRL, stock and adaptive, in one process and under DDP: the table of docs/huggingface.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.captured_logs import captured_log
from tests.hf.trainers import RANKS, Run, difference, train, trl_options
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.hf import AdaptiveArguments

pytestmark = pytest.mark.timeout(1800)
SHORT: dict[str, Any] = {"max_length": 64}
GENERATES: dict[str, Any] = {"max_completion_length": 6, "top_k": 1}
TURNS = ["messages", "answers"]
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "KTOTrainer in one process": ("trl", ["prompt", "completion"], SHORT),
    "KTOTrainer on several ranks": ("trl", ["prompt", "completion"], SHORT),
    "DistillationTrainer": ("trl", ["prompt"], GENERATES),
    "CPOTrainer": ("trl.experimental.cpo", ["prompt", "chosen", "rejected"], SHORT),
    "ORPOTrainer": ("trl.experimental.orpo", ["prompt", "chosen", "rejected"], SHORT),
    "TPOTrainer": ("trl.experimental.tpo", ["prompt", "chosen", "rejected", "reference"], SHORT),
    "GKDTrainer": ("trl.experimental.gkd", TURNS, {**SHORT, "lmbda": 0.0, "max_new_tokens": 6}),
    "GKDTrainer on-policy": (
        "trl.experimental.gkd",
        ["messages", "answers"],
        {**SHORT, "lmbda": 1.0, "max_new_tokens": 6},
    ),
    "IWOPDTrainer": (
        "trl.experimental.iw_opd",
        ["messages", "answers"],
        {"max_length": 64, "max_completion_length": 6},
    ),
    "OnlineDPOTrainer": ("trl.experimental.online_dpo", ["prompt"], {"max_new_tokens": 6}),
    "GMPOTrainer": ("trl.experimental.gmpo", ["prompt"], {**GENERATES, "num_generations": 4}),
    "A2POTrainer": ("trl.experimental.a2po", ["prompt"], {"max_completion_length": 6, "num_value_samples": 2}),
    "SDFTTrainer": ("trl.experimental.sdft", ["prompt", "privileged_context"], GENERATES),
    "SDPOTrainer": ("trl.experimental.sdpo", ["prompt"], {**GENERATES, "num_generations": 4}),
}


def names_for(placement: str) -> list[str]:
    other = "on several ranks" if placement == "one process" else "in one process"
    return [name for name in CASES if not name.endswith(other)]


def outcome(name: str, folder: Path, placement: str) -> str:
    """Collective: train with stock, and with the mixin, which later runs out of memory in two steps."""
    module, columns, settings = CASES[name]
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, **settings}

    def run(*adaptive: AdaptiveArguments, **faults: Any) -> Run:
        given = trl_options(name.split()[0], folder, module=module, columns=columns, **settings)
        return train(folder, *adaptive, **given, **faults)

    with captured_log("torchtune_adaptive") as lines:
        stock = run()
        try:
            healthy = run(AdaptiveArguments())
        except AdaptiveError as error:
            known = "does not call super", "one row per completion", "KTO's default loss on several ranks"
            return "refused" if any(each in str(error) for each in known) else str(error)
        assert difference(healthy, stock, least=1.0) < 1e-5, name
        if any("without recovery" in line for line in from_all_ranks(lines)[0]):
            return "without recovery"
        failed = run(AdaptiveArguments(), faults=[(2, 60), (3, 100)], failing_rank=RANKS[placement] - 1)
        assert difference(failed, stock, least=1.0) < 1e-5, name
        assert failed.log[-1]["oom_recoveries"] == 2, name
        return "recovers"


def outcomes(placement: str) -> dict[str, str]:
    """Collective."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: outcome(name, Path(folder), placement) for name in names_for(placement)}


@pytest.mark.parametrize("placement", ["one process", "DDP"])
def test_each_trainer_has_the_result_of_the_table(placement: str) -> None:
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text().partition("## Other trainers of TRL")[2]
    table = {
        name + more: result for name, more, result in re.findall(r"^\| `(\w+)`([ \w-]*?) \| ([\w ]+) \|", page, re.M)
    }
    assert table.keys() == CASES.keys()
    for found in run_on_ranks(RANKS[placement], outcomes, placement, in_group=False, timeout_s=300):
        assert found == {name: table[name] for name in names_for(placement)}
