"""GRPO of all weights and of adapters gives equal results on one to three ranks, with other splits and after OOM."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchtune.modules import peft

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from tests.recipes.grpo.tiny import JUDGE, KINDS, STEPS, grpo_config
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import load_ours
from torchtune_adaptive.rl.stages import GENERATE, SCORE_POLICY, SCORE_REFERENCE, TRAIN_POLICY

FAULTS = {GENERATE: 30, SCORE_POLICY: 5, SCORE_REFERENCE: 20, TRAIN_POLICY: 60}
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ("batch_size=6",)),
    "two ranks": (2, ()),
    "three ranks": (3, ("batch_size=2",)),
    "few rows": (2, ("forward_batch_size=1",)),
    "by tokens": (2, ("adaptive.token_budget=24",)),
    "out of memory": (2, ()),
    "judged": (2, JUDGE),
}
"""Number of ranks and overrides."""
OF_ADAPTERS = ("one rank", "two ranks", "out of memory")
CASES = [(kind, name) for kind in KINDS for name in WAYS if kind == "full_grpo" or name in OF_ADAPTERS]


def run_all(folder: Path, ranks: int) -> None:
    """Collective: run every case that uses this number of ranks."""
    for kind, name in CASES:
        ranks_of_way, overrides = WAYS[name]
        if ranks_of_way == ranks:
            run(kind, folder / kind / name, name, overrides)


def run(kind: str, folder: Path, name: str, overrides: tuple[str, ...]) -> None:
    """Collective: run to the end; in the OOM case, every stage of the second iteration runs out of memory."""
    recipe = load_ours(kind)(grpo_config(kind, folder, *overrides))
    with mock.patch.object(peft.LoRALinear, "initialize_parameters", alike_on_any_number_of_ranks):
        recipe.setup()
    runners = recipe.stages.runners
    failing = FAULTS if name == "out of memory" else {}
    for number, stage in enumerate(failing):
        injector = FaultInjector(runners[stage])
        injector.fail_at(rank=number % 2, step=2, operation=FAULTS[stage]).__enter__()
    recipe.train()
    assert [runner.recoveries for runner in runners.values()] == [bool(failing)] * len(runners)
    recipe.cleanup()


def alike_on_any_number_of_ranks(module: peft.LoRALinear) -> None:
    nn.init.constant_(module.lora_a.weight, 0.05)
    nn.init.zeros_(module.lora_b.weight)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    for ranks in (1, 2, 3):
        run_on_ranks(ranks, run_all, folder, ranks, timeout_s=200, in_group=False)
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights and adapters saved by a run."""
    saved: dict[str, Tensor] = {}
    for path in sorted((folder / "out" / "epoch_0").glob("*model*")):
        saved |= torch.load(path, weights_only=True)
    return saved


@pytest.mark.smoke("full_grpo-out of memory")
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1] not in ("two ranks", "judged")])
def test_ranks_split_and_recovery_do_not_change_training(runs: Path, kind: str, name: str) -> None:
    like = runs / kind / "two ranks"
    lines, expected = (read_log(folder / "log.jsonl") for folder in (runs / kind / name, like))
    assert len(lines) == len(expected) == STEPS
    figures = ("scores", "loss", "kl", "entropy", "cut_off", "grad_norm", "groups_without_signal")
    assert_same_figures(lines, expected, figures, rel=1e-4, abs=1e-6)
    for weight_name, weight in weights(like).items():
        torch.testing.assert_close(
            weights(runs / kind / name)[weight_name], weight, rtol=1e-4, atol=1e-6, msg=weight_name
        )


def test_reward_model_and_functions_are_added(runs: Path) -> None:
    line, plain = (read_log(runs / "full_grpo" / name / "log.jsonl")[0] for name in ("judged", "two ranks"))
    assert plain["scores"] == pytest.approx(plain["reward/correct_digits"], abs=1e-6)
    assert line["scores"] == pytest.approx(
        line["reward/correct_digits"], abs=1e-3
    )  # digits contain no lowercase letters


def test_only_adapters_change_and_they_are_saved(runs: Path) -> None:
    adapters = {name: of for name, of in weights(runs / "lora_grpo" / "two ranks").items() if "lora_b" in name}
    assert all(weight.abs().max() > 0 for weight in adapters.values())
    assert adapters
    line = read_log(runs / "lora_grpo" / "two ranks" / "log.jsonl")
    assert line[0]["kl"] != line[-1]["kl"] > 0
