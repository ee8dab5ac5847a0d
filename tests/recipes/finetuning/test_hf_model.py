"""Example of a model of transformers: a recipe trains like a plain loop, and `from_pretrained` loads the result."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from tests.forked_commands import tune_run_forked
from tests.pages.test_documents import ROOT
from tests.pages.tutorial_model import tiny_tokenizer
from tests.recipes.running import RELATIVE

EXAMPLES = ROOT / "examples"
SAMPLES, PER_STEP, LR = 32, 8, 0.05
SIZES = {
    "vocab_size": 513,  # two ranks cannot share it equally
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS = {
    "tied": (Qwen3Config(**SIZES, tie_word_embeddings=True), 2),
    "untied": (LlamaConfig(**SIZES, tie_word_embeddings=False), None),
}
"""Config, and number of ranks, or None for one process without a launcher."""


def write_inputs(folder: Path, kind: str, ranks: int | None, epochs: int) -> None:
    config = yaml.safe_load((EXAMPLES / "hf_model.yaml").read_text())
    config |= {"model_dir": "base", "device": "cpu", "dtype": "fp32", "epochs": epochs, "shuffle": False}
    config |= {"batch_size": PER_STEP // 4 // (ranks or 1), "clip_grad_norm": None, "log_peak_memory_stats": False}
    config |= {"optimizer": {"_component_": "torch.optim.SGD", "lr": LR}, "adaptive": {"memory_limit": "3MiB"}}
    config["tokenizer"]["max_seq_len"] = 64
    config["dataset"]["data_files"] = "train.jsonl"
    config["model"]["checkpoint_layers"] = kind == "tied"
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))


def chat(number: int) -> list[dict[str, str]]:
    question = "what is " + " plus ".join(map(str, range(number % 5 + 1)))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": str(number * 37)}]


def plain_loop(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for first in [*range(0, SAMPLES, PER_STEP)] * epochs:
        losses, count = [], 0
        for number in range(first, first + PER_STEP):
            prompt = tokenizer.apply_chat_template(chat(number)[:1], add_generation_prompt=True, return_dict=False)
            whole = tokenizer.apply_chat_template(chat(number), return_dict=False)
            targets = torch.tensor(whole[len(prompt) :])
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
            losses.append(cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
        (torch.stack(losses).sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MODELS)
def test_model_of_transformers_trains_resumes_and_saves_like_a_plain_loop(tmp_path: Path, kind: str) -> None:
    config, ranks = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    shutil.copy(EXAMPLES / "hf_components.py", tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps({'messages': chat(i)})}\n" for i in range(SAMPLES)))

    command = ("adaptive_full_finetune_distributed", "--config", "mine.yaml")
    for epochs in (1, 2):
        write_inputs(tmp_path, kind, ranks, epochs)
        done = tune_run_forked(*command, ranks=ranks, cwd=tmp_path, timeout_s=120)
        assert done.status == 0, done.output
    assert "resuming from" in done.output

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/hf_model/epoch_1")
    plain_loop(model, tokenizer, epochs=2)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], weight, rtol=RELATIVE, atol=RELATIVE)
