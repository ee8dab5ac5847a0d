"""PPO with the models and checkpointers of torchtune's config: Hugging Face folders of a policy and a reward model."""

from pathlib import Path

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from tests.ranks import on_ranks
from tests.recipes.finetuning.test_stock_configs import read_weights
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import load_ours, train_until
from tests.recipes.stock_configs import SMALL, file_names, shrunk_models, write_checkpoint
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE
from torchtune_adaptive.rl.stages import TRAIN_POLICY

SHIPPED = Path(torchtune.__file__).parents[1] / "recipes" / "configs" / "mistral" / "7B_full_ppo_low_memory.yaml"
SECTIONS = {
    "checkpointer": "policy",
    "ref_policy_checkpointer": "policy",
    "value_checkpointer": "value",
    "reward_checkpointer": "value",
}
OF_MODELS = {"policy": ("policy_model", "checkpointer"), "value": ("reward_and_value_model", "value_checkpointer")}
RESUMED = ("dataset.samples=32", "num_steps=32", "save_every_n_steps=1", "resume_from_checkpoint=auto")


def mistral_config(folder: Path) -> DictConfig:
    cfg, shipped = ppo_config(folder, *RESUMED), OmegaConf.load(SHIPPED)
    for section in ("policy_model", "reward_and_value_model", *SECTIONS):
        cfg[section] = shipped[section]
    for section, model in SECTIONS.items():
        cfg[section].checkpoint_dir = str(folder.parent / model)
    # the config builds this model from its parts, so `shrunk_models` does not make it small
    sizes = {name: size for name, size in SMALL.items() if name in cfg.reward_and_value_model}
    cfg.reward_and_value_model.update(sizes, num_kv_heads=2, vocab_size=VOCAB_SIZE + 1)
    return cfg


def of_model(cfg: DictConfig, model: str) -> DictConfig:
    """Return the config of one model under the names of other recipes."""
    names = dict(zip(("model", "checkpointer"), OF_MODELS[model], strict=True))
    plain = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.create({**{name: plain[key] for name, key in names.items()}, "dtype": "fp32", "output_dir": "out"})


def train(folder: Path, stop_at: int | None = None) -> dict[str, dict[str, Tensor]]:
    """Train to the end, or until iteration `stop_at` has trained the value model; return the weights of both models."""
    with shrunk_models():
        recipe = load_ours("full_ppo")(mistral_config(folder))
        recipe.setup()
    train_until(recipe, recipe.stages[TRAIN_POLICY], stop_at)
    models = {"policy": recipe.models.policy, "value": recipe.models.value}
    return {name: dict(model.state_dict()) for name, model in models.items()}  # in one process, weights are not sharded


@on_ranks(1, timeout_s=150, in_group=False)
def test_torchtunes_checkpointers_load_both_models_and_a_run_resumes_from_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for model in OF_MODELS:
        write_checkpoint(of_model(mistral_config(tmp_path / "whole"), model))
    trained = train(tmp_path / "whole")
    train(tmp_path / "stopped", stop_at=3)
    train(tmp_path / "stopped")
    for model in OF_MODELS:
        cfg = of_model(mistral_config(tmp_path / "whole"), model)
        begun = read_weights(cfg, tmp_path / model, file_names(cfg))
        for run in ("whole", "stopped"):
            folder = tmp_path / run / "out" / "epoch_0" / ("value" if model == "value" else "")
            found = read_weights(cfg, folder, sorted(path.name for path in folder.glob("model-*.safetensors")))
            assert found.keys() == trained[model].keys()
            assert all(torch.equal(found[name], trained[model][name]) for name in found), (run, model)
            assert any(not torch.equal(found[name], begun[name]) for name in found), (run, model)
