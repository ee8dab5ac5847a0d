"""Tiny PPO runs, ours and torchtune's, with answers given by the test or sampled from the policy."""

import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import generation

from tests.recipes.running import STOCK, config_in, stock_on_cpu
from torchtune_adaptive.demo.tokenizer import SPECIAL_TOKENS
from torchtune_adaptive.rl.stages import FORWARD, GENERATE, TRAIN_POLICY, TRAIN_VALUE

STAGES = (GENERATE, *FORWARD, TRAIN_VALUE, TRAIN_POLICY)
"""All stages of an iteration of PPO, in order."""
NEW = 6
STOP = SPECIAL_TOKENS["<|eos|>"]
TINY = (
    "dataset.samples=24",
    "shuffle=False",
    "batch_size=8",
    "ppo_batch_size=4",
    "ppo_epochs=2",
    "num_steps=24",
    "forward_batch_size=8",
    "gradient_accumulation_steps=1",
    f"max_generated_tokens={NEW}",
    "use_maximum_batch_size=False",
    "adaptive=null",
    "optimizer._component_=torch.optim.SGD",
    "optimizer.lr=0.05",
    "optimizer.fused=False",
)


def ppo_config(folder: Path, *overrides: str) -> DictConfig:
    """Return a small demo config."""
    return config_in(folder, "ppo", *TINY, *overrides)


def run_stock_ppo(cfg: DictConfig) -> None:
    """Run torchtune's recipe with given answers."""
    recipe_type = runpy.run_path(str(STOCK / "ppo_full_finetune_single_device.py"))["PPOFullFinetuneRecipeSingleDevice"]
    with stock_on_cpu(), mock.patch("torchtune.generation.generate", _given_to_stock):
        recipe = recipe_type(cfg)
        recipe.setup(cfg)
        recipe.train()
        recipe.cleanup()


def give_answers(_: object) -> None:
    """From here on, in this process, let our policy return the given answers, like torchtune's."""
    mock.patch("torchtune_adaptive.rl.generation.generate", _given).start()


def answer_to(prompt: Sequence[int]) -> list[int]:
    """Return an answer that depends only on the prompt; some stop early, one at its first token."""
    draw = random.Random(repr(list(prompt)))
    tokens = [draw.choice([*range(32, 127)]) for _ in range(NEW)]
    end = draw.randrange(2 * NEW)
    return tokens if end >= NEW else [*tokens[:end], STOP, *tokens[end + 1 :]]


def _given(model: nn.Module, prompts: Sequence[Tensor], drawn: Tensor, *options: Any, **places: Any) -> Tensor:
    return torch.tensor([answer_to(prompt.tolist()) for prompt in prompts])


def _given_to_stock(model: nn.Module, prompt: Tensor, *, pad_id: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the answers and the policy's logits for them."""
    answers = torch.tensor([answer_to([t for t in row if t != pad_id]) for row in prompt.tolist()])
    whole = torch.cat([prompt, answers], dim=1)
    real = whole != pad_id
    mask = generation.get_causal_mask_from_padding_mask(real, target_seq_len=model.decoder_max_cache_seq_len)
    model.reset_caches()
    logits = model(whole, input_pos=generation.get_position_ids_from_padding_mask(real), mask=mask)
    return whole, logits[:, prompt.size(1) - 1 : -1]
