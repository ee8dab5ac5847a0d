"""What the config says of each stage."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.rl.stages import FORWARD, GENERATE, STAGES, TRAIN_POLICY, TRAIN_VALUE, configured_limits


def rows(*overrides: str) -> dict[str, int]:
    """Of each stage, without a search."""
    cfg = OmegaConf.merge(OmegaConf.load(config_files()["adaptive/demo/ppo"]), OmegaConf.from_dotlist([*overrides]))
    assert isinstance(cfg, DictConfig)
    limits = configured_limits(read_ppo_settings(cfg)[1])
    assert all(isinstance(limit, RowLimit) for limit in limits.values())
    return {stage: limit.size for stage, limit in limits.items()}


def test_forward_batch_size_bounds_what_has_no_backward() -> None:
    found = rows("batch_size=32", "ppo_batch_size=16", "forward_batch_size=5", "gradient_accumulation_steps=2")
    assert found == {**dict.fromkeys((GENERATE, *FORWARD), 5), TRAIN_VALUE: 8, TRAIN_POLICY: 8}


def test_no_stage_has_more_rows_than_there_are_samples() -> None:
    found = rows("batch_size=8", "ppo_batch_size=4", "forward_batch_size=64", "gradient_accumulation_steps=1")
    assert found == {**dict.fromkeys(STAGES, 8), TRAIN_VALUE: 4, TRAIN_POLICY: 4}
