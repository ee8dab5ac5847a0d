"""TRL's GRPO on a model of 1.5B parameters, made from its configuration: stock, or adaptive with a search.

tune-adaptive rehearse --ranks 1 --memory 24GB --steps 20 -- tests/hf/one_billion_grpo.py [adaptive]
"""

import os
import sys
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from torchtune_adaptive.hf import AdaptiveArguments, adaptive

LONGEST_PROMPT = 512


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of even tokens in each answer."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


class LongestAnswers(GRPOTrainer):
    """Every answer is as long as allowed: a rehearsal computes nothing, so it does not know where answers end."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        answers, log_probs = super()._generate_single_turn(*args, **kwargs)
        return [[5] * self.max_completion_length for _ in answers], log_probs


words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(5000)}, "<unk>"))
words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
prompts = [" ".join(f"w{n}" for n in range(64 + 7 * row % (LONGEST_PROMPT - 63))) for row in range(200)]
config = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    dtype=torch.bfloat16,
)
with TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=8,
        num_iterations=2,
        max_completion_length=256,
        gradient_checkpointing=True,
        max_steps=20,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    options: dict[str, Any] = {"args": arguments, "reward_funcs": even_words, "processing_class": tokenizer}
    model, dataset = Qwen2ForCausalLM._from_config(config), Dataset.from_dict({"prompt": prompts})
    if sys.argv[1:] == ["adaptive"]:
        searching = AdaptiveArguments(use_maximum_batch_size=True)
        trainer = adaptive(LongestAnswers)(model, train_dataset=dataset, adaptive=searching, **options)
    else:
        trainer = LongestAnswers(model, train_dataset=dataset, **options)
    trainer.train()
