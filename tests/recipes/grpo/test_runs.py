"""One run of GRPO by one rank and by two, cut in other ways, out of memory, and stopped: the same all over."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.rl.stages import GENERATE, SCORE_POLICY, SCORE_REFERENCE, TRAIN_POLICY
from torchtune_adaptive.testing import FaultInjector

STEPS = 3
TINY = (
    *(f"{section}.{size}" for section in ("model", "demo_sizes") for size in ("num_layers=1", "embed_dim=32")),
    "dataset.samples=48",
    "shuffle=False",
    "batch_size=2",
    "grpo_samples=4",
    "without_signal=drop",
    f"num_steps={STEPS}",
    "ppo_epochs=2",
    "forward_batch_size=8",
    "loss.kl_coeff=0.05",
    "use_maximum_batch_size=False",
    "adaptive=null",
    "optimizer._component_=torch.optim.SGD",
    "optimizer.lr=0.5",
    "optimizer.fused=False",
    "clip_grad_norm=null",
)
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "two ranks": (2, ("adaptive.show_answers=2",)),
    "one rank": (1, ("batch_size=4",)),
    "three ranks": (3, ("batch_size=1", "num_steps=4", "dataset.samples=12")),
    "few rows": (2, ("forward_batch_size=1",)),
    "by tokens": (2, ("adaptive.token_budget=24",)),
    "out of memory": (2, ()),
}
FAULTS = {GENERATE: 30, SCORE_POLICY: 5, SCORE_REFERENCE: 20, TRAIN_POLICY: 60}


def config(folder: Path, *overrides: str) -> DictConfig:
    cfg = OmegaConf.load(config_files()["adaptive/demo/grpo"])
    ours = [
        *TINY,
        f"output_dir={folder / 'out'}",
        "metric_logger._component_=tests.recipes.recording.JsonLogger",
        f"metric_logger.path={folder / 'log.jsonl'}",
        *(f"{files}.checkpoint_dir={folder / 'weights'}" for files in ("checkpointer", "ref_checkpointer")),
    ]
    merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*ours, *overrides]))
    assert isinstance(merged, DictConfig)
    del merged.metric_logger["log_dir"]
    return merged


def recipe_of(cfg: DictConfig) -> Any:
    """Collective."""
    module: Any = import_module("adaptive_grpo_full_finetune_distributed")
    recipe = module.AdaptiveGRPOFullFinetuneDistributed(cfg)
    recipe.setup()
    return recipe


def run(folder: Path, way: str, port: int) -> None:
    """Collective: a whole run."""
    os.environ["MASTER_PORT"] = str(port)
    recipe = recipe_of(config(folder, *WAYS[way][1]))
    for stage, operation in FAULTS.items() if way == "out of memory" else ():
        FaultInjector(recipe.stages.runners[stage]).fail_at(rank=1, step=2, operation=operation).__enter__()
    recipe.train()
    if way == "out of memory":
        assert all(recipe.stages.runners[stage].recoveries == 1 for stage in FAULTS)
    recipe.cleanup()


def weights(folder: Path, epoch: int = 0) -> dict[str, Tensor]:
    saved: dict[str, Tensor] = torch.load(folder / "out" / f"epoch_{epoch}" / "model-00001-of-00001.bin")
    return saved


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    for (way, (ranks, _)), port in zip(WAYS.items(), free_ports(len(WAYS)), strict=True):
        run_on_ranks(ranks, run, folder / way, way, port, timeout_s=120, in_group=False)
    return folder


@pytest.mark.parametrize("way", ["one rank", "few rows", "by tokens", "out of memory"])
def test_neither_ranks_nor_split_nor_recovery_change_what_is_trained(runs: Path, way: str) -> None:
    lines, expected = (read_log(runs / each / "log.jsonl") for each in (way, "two ranks"))
    assert len(lines) == len(expected) == STEPS
    for line, like in zip(lines, expected, strict=True):
        for figure in ("scores", "success", "loss", "kl", "entropy", "response_lengths", "cut_off", "grad_norm"):
            assert line[figure] == pytest.approx(like[figure], rel=1e-4, abs=1e-6), figure
    for name, weight in weights(runs / "two ranks").items():
        torch.testing.assert_close(weights(runs / way)[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_three_ranks_have_an_update_with_as_many_answers_each(runs: Path) -> None:
    lines = read_log(runs / "three ranks" / "log.jsonl")
    assert len(lines) == 4
    assert all(line["groups_without_signal"] <= 3 for line in lines)


def stop_and_resume(folder: Path, ports: list[int]) -> None:
    """Collective: ends in the middle of the third iteration, and goes on from the checkpoint of the second."""
    cfg = config(folder, "save_every_n_steps=1", "resume_from_checkpoint=auto", "overwrite_output_dir=False")
    os.environ["MASTER_PORT"] = str(ports[0])
    recipe = recipe_of(cfg)
    iterate = recipe.iterate

    def stopping(prompts: Any, iteration: int) -> dict[str, float]:
        figures: dict[str, float] = iterate(prompts, iteration)
        if iteration == STEPS:
            raise KeyboardInterrupt
        return figures

    recipe.iterate = stopping
    with pytest.raises(KeyboardInterrupt):
        recipe.train()
    recipe.cleanup()
    os.environ["MASTER_PORT"] = str(ports[1])
    resumed = recipe_of(cfg)
    assert resumed.run.progress.step == STEPS - 1
    resumed.train()
    resumed.cleanup()


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(runs: Path) -> None:
    run_on_ranks(2, stop_and_resume, runs / "stopped", free_ports(2), timeout_s=120, in_group=False)
    expected = weights(runs / "two ranks")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(runs / "stopped").items())


def test_answers_are_shown_every_so_many_iterations(runs: Path) -> None:
    lines = read_log(runs / "two ranks" / "out" / "adaptive_answers.jsonl")
    assert [(line["step"], len(line["answers"]), len(line["rewards"])) for line in lines] == [(2, 4, 4)]
