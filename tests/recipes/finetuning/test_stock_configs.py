"""Configs that torchtune ships train and save on two ranks, unchanged except for hardware, network and weights (see
stock_configs.py): one per family of models, and all of them nightly.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import config
from torchtune.modules.peft import get_adapter_state_dict

from tests.recipes.stock_configs import (
    RECIPES,
    StockConfig,
    file_names,
    import_model,
    shrunk_models,
    steps_of,
    stock_configs,
    train,
)
from torchtune_adaptive.config.checks import check_keys

ALL = stock_configs()
ONE_OF_A_FAMILY = {
    *("gemma2/2B_full", "llama3_2/1B_full", "llama3_2_vision/11B_full", "llama3_3/70B_full_multinode"),
    *("mistral/7B_full", "phi4/14B_full", "qwen2/0.5B_full", "gemma/2B_lora", "llama2/7B_qlora", "llama3/8B_dora"),
    *("llama3_1/8B_lora_dpo", "phi3/mini_lora", "qwen2_5/0.5B_lora"),
}
MLP = {"w1", "w2", "w3"}


def test_torchtune_has_configs_for_every_recipe_and_every_family_is_covered() -> None:
    assert {stock.recipe for stock in ALL} == set(RECIPES)
    assert {name.partition("/")[0] for name in ONE_OF_A_FAMILY} == {stock.name.partition("/")[0] for stock in ALL}
    assert {stock.name for stock in ALL} >= ONE_OF_A_FAMILY


@pytest.mark.smoke("llama3_2/1B_full")
@pytest.mark.parametrize(
    "stock",
    [
        pytest.param(stock, id=stock.name, marks=[] if stock.name in ONE_OF_A_FAMILY else pytest.mark.nightly)
        for stock in ALL
    ],
)
def test_every_step_has_a_finite_loss_and_the_weights_described_by_the_config_are_saved(
    stock: StockConfig, tmp_path: Path
) -> None:
    check_keys(stock.load(), log=False)
    cfg = train(stock, tmp_path, world_size=2)
    losses = logged_losses(cfg)
    assert len(losses) >= steps_of(cfg)
    assert torch.tensor(losses).isfinite().all()
    before = read_weights(cfg, Path(cfg.checkpointer.checkpoint_dir), file_names(cfg))
    if stock.is_lora:
        adapter = torch.load(epoch_folder(cfg) / "adapter_model.pt", weights_only=True)
        assert adapter.keys() == get_adapter_state_dict(built(cfg).state_dict()).keys()
        assert {weight.shape[0] for name, weight in adapter.items() if "lora_a" in name} == {cfg.model.lora_rank}
        assert any("magnitude" in name for name in adapter) == cfg.model.get("use_dora", False)
        adapted = {name.split(".")[-3] for name in adapter if name.endswith("lora_a.weight")}
        assert adapted == described_layers(cfg.model)
        assert any(weight.any() for name, weight in adapter.items() if "lora_b" in name), "no step moved it"
    if cfg.get("save_adapter_weights_only", False):
        assert not list(epoch_folder(cfg).glob("model-*"))
        return
    files = sorted(path.name for path in epoch_folder(cfg).glob("model-*-of-*"))
    after = read_weights(cfg, epoch_folder(cfg), files)
    assert after.keys() == before.keys()
    assert all(weight.isfinite().all() for weight in after.values())
    if not stock.is_lora:
        moved = {name for name in before if not torch.equal(after[name], before[name])}
        assert moved
        assert moved <= {name for name, weight in built(cfg).state_dict(keep_vars=True).items() if weight.requires_grad}


def test_one_process_trains_quantized_weights_without_sharding(tmp_path: Path) -> None:
    [stock] = [stock for stock in ALL if stock.name == "llama2/7B_qlora"]
    assert logged_losses(train(stock, tmp_path, world_size=1))


def logged_losses(cfg: DictConfig) -> list[float]:
    (log,) = Path(cfg.metric_logger.log_dir).glob("*.txt")
    figures = [line.split("loss:")[1] for line in log.read_text().splitlines() if "loss:" in line]
    return [float(figure.split()[0]) for figure in figures]


def epoch_folder(cfg: DictConfig) -> Path:
    return Path(cfg.output_dir) / "epoch_0"


def read_weights(cfg: DictConfig, folder: Path, files: list[str]) -> dict[str, torch.Tensor]:
    """Read weights from a folder with the config's checkpointer."""
    section = cfg.checkpointer.copy()
    section.checkpoint_dir, section.checkpoint_files = str(folder), files
    section.output_dir = str(Path(cfg.output_dir).with_name("unused"))
    return config.instantiate(section).load_checkpoint()["model"]


def built(cfg: DictConfig) -> nn.Module:
    """Return the model as torchtune's builder returns it."""
    import_model(cfg)
    with shrunk_models():
        return config.instantiate(cfg.model)


def described_layers(cfg_model: DictConfig) -> set[str]:
    mlp = MLP if cfg_model.apply_lora_to_mlp else set()
    output = {"output"} if cfg_model.get("apply_lora_to_output", False) else set()
    return {*cfg_model.lora_attn_modules, *mlp, *output}
