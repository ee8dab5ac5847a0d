"""Components with which a recipe trains a causal language model of transformers that torchtune does not have.

    cp examples/hf_components.py .
    tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config examples/hf_model.yaml

Recipes find components in the working directory. Checkpoints have transformers' names, so `from_pretrained` loads them.
This file is for full finetuning of models such as Llama, Qwen 3, Mistral and SmolLM. It does not support models that
scale or cap their logits (Gemma 2, Cohere, Granite), LoRA, or token budgets without padding.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from torchtune.data import truncate
from torchtune.training import FullModelHFCheckpointer
from transformers import AutoConfig, AutoModel, AutoTokenizer


class CausalModel(nn.Module):
    """A model of transformers with the signature of torchtune's models."""

    def __init__(self, folder: str, *, checkpoint_layers: bool = False) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        self.lm_head = None  # None: use the embedding's weights, because two sharded parameters cannot share weights
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if checkpoint_layers:
            self.model.activation_checkpointing_enable()

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor | None = None, input_pos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [rows, tokens, vocabulary]. Rows are padded on the right, so attention needs no mask."""
        if mask is not None:
            mask = mask[:, None]  # packed rows: [rows, 1, tokens, tokens]
        hidden = self.model(tokens, attention_mask=mask, position_ids=input_pos, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return linear(hidden, self.model.get_input_embeddings().weight)
        return self.lm_head(hidden)

    def rope_init(self) -> None:
        """Compute the frequencies of position embeddings, which are not in checkpoints; recipes call it."""
        for module in self.modules():
            if hasattr(module, "inv_freq"):
                for name, value in type(module)(self.model.config).named_buffers():
                    setattr(module, name, value)


class Checkpointer(FullModelHFCheckpointer):
    """Reads and writes weights with the names of transformers. torchtune's class renames them."""

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the weights and, if the run resumes, the state of the recipe."""
        weights = {name: value for path in self._checkpoint_paths for name, value in load_file(path).items()}
        if self._config.get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        state = torch.load(self._recipe_checkpoint, weights_only=True) if self._should_load_recipe_state else {}
        return {**state, "model": weights}

    def save_checkpoint(
        self, state: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False, **_: bool
    ) -> None:
        """Write what `from_pretrained` reads into `epoch_N`, and the state of the recipe if the run continues."""
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._checkpoint_dir.iterdir():
            if path.suffix in (".json", ".txt", ".jinja", ".model") and not path.name.endswith(".index.json"):
                shutil.copy(path, folder)
        # Weights that the ranks cannot share equally have padding, which safetensors rejects and a clone drops.
        weights = {name: value.clone() for name, value in state.pop("model").items()}
        save_torch_state_dict(weights, folder, filename_pattern="model{suffix}.safetensors", metadata={"format": "pt"})
        if intermediate_checkpoint:
            recipe_state = self._output_dir / "recipe_state" / "recipe_state.pt"
            recipe_state.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, recipe_state)


class Tokenizer:
    """The tokenizer of a folder, with its chat template. The loss ignores the turns that the dataset masks."""

    def __init__(self, folder: str, max_seq_len: int | None = None) -> None:
        self.max_seq_len, self._tokenizer = max_seq_len, AutoTokenizer.from_pretrained(folder)
        self.eos_id = self._tokenizer.eos_token_id
        self.pad_id = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self.eos_id

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace `messages` by `tokens` and `mask`."""
        turns = [{"role": each.role, "content": each.text_content} for each in sample["messages"]]
        tokens: list[int] = []
        mask: list[bool] = []
        for number, message in enumerate(sample["messages"], start=1):
            before = self._tokens(turns[: number - 1], add_generation_prompt=True) if not message.masked else tokens
            whole = self._tokens(turns[:number])
            if whole[: len(before)] != before or before[: len(tokens)] != tokens:
                raise ValueError("the chat template changes earlier turns, so the turns to learn from are not known")
            mask += [True] * (len(before) - len(tokens)) + [message.masked] * (len(whole) - len(before))
            tokens = whole
        if self.max_seq_len is not None:
            tokens, mask = truncate(tokens, self.max_seq_len), truncate(mask, self.max_seq_len)
        return {**{key: value for key, value in sample.items() if key != "messages"}, "tokens": tokens, "mask": mask}

    def _tokens(self, turns: list[dict[str, str]], **options: bool) -> list[int]:
        return self._tokenizer.apply_chat_template(turns, return_dict=False, **options)
