"""An iteration compared with TRL's GRPOTrainer on one process: the same weights and answers, two updates."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchtune.models.convert_weights import tune_to_hf

from tests.ranks import run_on_ranks
from tests.recipes.grpo.tiny import grpo_config
from tests.recipes.running import load_ours
from torchtune_adaptive.demo.dataset import DemoDataset
from torchtune_adaptive.demo.model import random_digits_weights
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE, DemoTokenizer
from torchtune_adaptive.rl.rollouts import Rollout
from torchtune_adaptive.tune import distributed

pytest.importorskip("trl")

SIZES = {"num_layers": 1, "embed_dim": 32, "intermediate_dim": 128, "max_seq_len": 64}
PROMPTS, ANSWERS, NEW, TEMPERATURE, KL = 3, 4, 6, 0.7, 0.05
STOP = DemoTokenizer().eos_id


class Loss(NamedTuple):
    """Names of a loss in our config and in TRL."""

    average: str
    scaled: bool
    high: float


LOSSES = {"grpo": Loss("answers", True, 0.2), "dr_grpo": Loss("length", False, 0.2), "dapo": Loss("tokens", True, 0.28)}


class Update(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    """Gradients, under transformers' names."""


def questions(tokenizer: DemoTokenizer, samples: int) -> DemoDataset:
    """Component for the `dataset` section of a config: prompts of several lengths."""

    def make(index: int) -> Any:
        tokens = tokenizer.encode("17" * (index + 1) + "=", add_eos=False)
        return {"tokens": tokens, "labels": list(tokens)}

    return DemoDataset(samples, make)


def worth(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward computed from tokens, so that tokenizers need not agree."""
    return [sum(token % 7 for token in tokens if token != STOP) / 10 for tokens in completion_ids]


def in_hf(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights or gradients to transformers' Llama names."""
    converted: dict[str, Tensor] = tune_to_hf(tensors, num_heads=4, num_kv_heads=2, dim=SIZES["embed_dim"])
    return converted


def ours(folder: Path, loss: Loss) -> tuple[list[Update], list[Rollout]]:
    cfg = grpo_config(
        "full_grpo",
        folder / "ours",
        f"dataset={{_component_: tests.recipes.grpo.test_trl.questions, samples: {PROMPTS}}}",
        "reward_functions=[{_component_: tests.recipes.grpo.test_trl.worth}]",
        f"batch_size={PROMPTS}",
        f"grpo_samples={ANSWERS}",
        f"max_generated_tokens={NEW}",
        f"temperature={TEMPERATURE}",
        *("num_steps=1", "ppo_epochs=2", "forward_batch_size=1"),
        f"loss={{epsilon: 0.2, epsilon_high: {loss.high}, kl_coeff: {KL}, average: {loss.average}}}",
        f"scale_rewards={loss.scaled}",
    )
    for name in ("policy", "reference"):
        section = cfg["checkpointer" if name == "policy" else "ref_checkpointer"]
        section.update(_component_="torchtune.training.FullModelTorchTuneCheckpointer", checkpoint_files=[f"{name}.pt"])
        del section["sizes"]
    recipe = load_ours("full_grpo")(cfg)
    recipe.setup()
    iterations, policy, gradients = recipe.iterations, recipe.loop.model, []

    def note(*_: object) -> None:
        gradients.append(in_hf({name: each.grad.clone() for name, each in policy.named_parameters()}))

    iterations.optimization.optimizers[0].register_step_pre_hook(note)
    everyone = iterations.generate_and_score([iterations.data.dataset[index] for index in range(PROMPTS)], 1)
    with (
        mock.patch.object(iterations, "generate_and_score", return_value=everyone),
        mock.patch.object(iterations, "update", wraps=iterations.update) as update,
    ):
        recipe.iterate([], 1)
    recipe.cleanup()
    figures = [call.args[1] for call in update.call_args_list]
    assert figures[1]["clipfrac"] > 0 < figures[1]["kl"]
    assert {len(rollout.prompt) for rollout in everyone} == {4, 6, 8}
    assert len({rollout.length for rollout in everyone}) > 2
    return [Update(each["loss"], of) for each, of in zip(figures, gradients, strict=True)], everyone


def theirs(folder: Path, loss_type: str, given: Sequence[Rollout]) -> list[Update]:
    """Run TRL, which splits the answers into other microbatches."""
    import pyarrow
    import trl
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from tests.hf.test_trainers import tokenizer
    from tests.hf.trainers import arguments

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=SIZES["embed_dim"],
            intermediate_size=SIZES["intermediate_dim"],
            num_hidden_layers=SIZES["num_layers"],
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )
    )
    model.load_state_dict(in_hf(torch.load(folder / "weights" / "reference.pt")))
    model.save_pretrained(folder / "hf")
    model = LlamaForCausalLM.from_pretrained(folder / "hf")  # TRL loads the reference from there
    model.load_state_dict(in_hf(torch.load(folder / "weights" / "policy.pt")))
    losses, gradients = Counter[int](), []

    class Noted(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **options: Any) -> Tensor:
            loss: Tensor = super().compute_loss(*args, **options)
            losses[self.state.global_step] += loss.item()
            return loss

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **rest: Any) -> None:
            gradients.append(
                {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            )

    def answer(prompts: Sequence[str], _: object) -> dict[str, Any]:
        turns: Counter[str] = Counter()
        rollouts = []
        for prompt in prompts:
            rollouts.append(given[int(prompt) * ANSWERS + turns[prompt]])
            turns[prompt] += 1
        return {
            "prompt_ids": [rollout.prompt.tolist() for rollout in rollouts],
            "completion_ids": [rollout.answer[: rollout.length].tolist() for rollout in rollouts],
            "logprobs": None,
        }

    loss, table = LOSSES[loss_type], pyarrow.table({"prompt": [str(index) for index in range(PROMPTS)]})
    trainer = Noted(
        model=model,
        reward_funcs=worth,
        rollout_func=answer,
        processing_class=tokenizer(),
        train_dataset=Dataset(table, fingerprint="prompts"),  # hashing a dataset fails with some versions of pyarrow
        callbacks=[Note()],
        args=arguments(
            folder,
            trl.GRPOConfig,
            per_device_train_batch_size=PROMPTS * ANSWERS // 2,
            gradient_accumulation_steps=2,
            num_generations=ANSWERS,
            num_iterations=2,
            max_steps=2,
            max_completion_length=NEW,
            temperature=TEMPERATURE,
            beta=KL,
            use_bias_correction_kl=False,
            loss_type=loss_type,
            scale_rewards="group" if loss.scaled else "none",
            epsilon=0.2,
            epsilon_high=loss.high,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
        ),
    )
    trainer.train()
    return [Update(losses[number], of) for number, of in enumerate(gradients)]


def compare(folder: Path, loss_type: str) -> int:
    """Return the number of equal updates."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    torch.manual_seed(0)
    reference = random_digits_weights(SIZES)
    policy = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in reference.items()}
    (folder / "weights").mkdir()
    torch.save(reference, folder / "weights" / "reference.pt")
    torch.save(policy, folder / "weights" / "policy.pt")
    updates, answers = ours(folder, LOSSES[loss_type])
    distributed.leave()
    for mine, its in zip(updates, theirs(folder, loss_type, answers), strict=True):
        assert mine.loss == pytest.approx(its.loss, rel=1e-5, abs=1e-6)
        assert mine.gradients.keys() == its.gradients.keys()
        most = max(gradient.abs().max() for gradient in its.gradients.values())
        apart = max((mine.gradients[name] - gradient).abs().max() for name, gradient in its.gradients.items())
        assert apart < 1e-5 * most
    return len(updates)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses_and_gradients_of_two_updates_equal_those_of_trl(tmp_path: Path, loss_type: str) -> None:
    assert run_on_ranks(1, compare, tmp_path, loss_type, in_group=False, timeout_s=100) == [2]
