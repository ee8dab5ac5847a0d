"""PPO with the checkpointers of its real configs: Hugging Face folders of a policy and a reward model."""

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from torchtune import config, training
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.mistral import mistral
from torchtune.models.mistral._component_builders import mistral_classifier
from torchtune.rlhf.utils import reward_tune_to_hf

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import load_ours
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE
from torchtune_adaptive.rl.stages import TRAIN_POLICY

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 64,
    "attn_dropout": 0.0,
}
HEADS = {"num_heads": SIZES["num_heads"], "num_kv_heads": SIZES["num_kv_heads"], "dim": SIZES["embed_dim"]}
KINDS = {"policy": "MISTRAL", "value": "REWARD"}
SECTIONS = {
    "checkpointer": "policy",
    "ref_policy_checkpointer": "policy",
    "value_checkpointer": "value",
    "reward_checkpointer": "value",
}
RESUMED = ("save_every_n_steps=1", "resume_from_checkpoint=auto")
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def make_weights(folder: Path) -> None:
    """Write both models as downloads: Hugging Face names, in two files, with a config."""
    torch.manual_seed(0)
    policy = mistral(vocab_size=VOCAB_SIZE, **SIZES).state_dict()
    value = mistral_classifier(num_classes=1, vocab_size=VOCAB_SIZE + 1, **SIZES).state_dict()
    write(folder / "policy", tune_to_hf(policy, **HEADS))
    write(folder / "value", reward_tune_to_hf(value, **HEADS))


def write(folder: Path, weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    names = sorted(weights)
    for file, part in zip(FILES, (names[::2], names[1::2]), strict=True):
        save_file({name: weights[name].contiguous() for name in part}, folder / file, {"format": "pt"})
    names_of_sizes = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    sizes = dict(zip(names_of_sizes, HEADS.values(), strict=True))
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")


def mistral_config(folder: Path, weights: Path) -> DictConfig:
    cfg = ppo_config(folder, "dataset.samples=32", "num_steps=32", *RESUMED)
    path = "torchtune.models.mistral"
    cfg.policy_model = {"_component_": f"{path}.mistral", "vocab_size": VOCAB_SIZE, **SIZES}
    cfg.reward_and_value_model = {
        "_component_": f"{path}._component_builders.mistral_classifier",
        "num_classes": 1,
        "vocab_size": VOCAB_SIZE + 1,
        **SIZES,
    }
    for section, model in SECTIONS.items():
        cfg[section] = OmegaConf.create(checkpointer(weights / model, model, FILES, folder / "out"))
    return cfg


def checkpointer(folder: Path, model: str, files: list[str], output: Path) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": files,
        "output_dir": str(output),
        "model_type": KINDS[model],
    }


def train(folder: Path, weights: Path, stop_at: int | None = None) -> dict[str, dict[str, Tensor]]:
    """Train to the end, or until iteration `stop_at` has trained the value model; return the weights of both models."""
    recipe = load_ours("full_ppo")(mistral_config(folder, weights))
    recipe.setup()
    train_until(recipe, recipe.stages.runners[TRAIN_POLICY], stop_at)
    models = {"policy": recipe.models.policy, "value": recipe.models.value}
    return {name: dict(model.state_dict()) for name, model in models.items()}  # in one process, weights are not sharded


def train_whole_and_in_two_starts(folder: Path) -> None:
    make_weights(folder / "weights")
    torch.save(train(folder / "whole", folder / "weights"), folder / "trained.pt")
    train(folder / "stopped", folder / "weights", stop_at=3)
    train(folder / "stopped", folder / "weights")


def loaded(folder: Path, model: str) -> dict[str, Tensor]:
    """Load weights with torchtune's checkpointer, under its names."""
    files = sorted(path.name for path in folder.glob("model-*.safetensors"))
    section = OmegaConf.create(checkpointer(folder, model, files, folder.with_name("nowhere")))
    weights: dict[str, Tensor] = config.instantiate(section).load_checkpoint()[training.MODEL_KEY]
    return weights


def test_torchtunes_checkpointers_load_both_models_and_a_run_resumes_from_them(tmp_path: Path) -> None:
    run_on_ranks(1, train_whole_and_in_two_starts, tmp_path, timeout_s=150, in_group=False)
    trained = torch.load(tmp_path / "trained.pt", weights_only=True)
    begun = {model: loaded(tmp_path / "weights" / model, model) for model in KINDS}
    for run in ("whole", "stopped"):
        epoch = tmp_path / run / "out" / "epoch_0"
        for model, folder in {"policy": epoch, "value": epoch / "value"}.items():
            found = loaded(folder, model)
            assert found.keys() == trained[model].keys()
            assert all(torch.equal(found[name], trained[model][name]) for name in found), (run, model)
            assert any(not torch.equal(found[name], begun[model][name]) for name in found), (run, model)
