"""A dataset of prompts for PPO and GRPO. Its other columns are passed to the reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import load_dataset
from torch.utils.data import Dataset
from torchtune.data import Message

from torchtune_adaptive.errors import ConfigError

Prompt = dict[str, Any]


class Prompts(Dataset[Prompt]):
    """Tokenizes one column of a table as a user message, and keeps all columns."""

    def __init__(self, tokenizer: Any, rows: Any, column: str, system: str | None) -> None:
        if column not in rows.column_names:
            raise ConfigError(f"dataset.column is {column!r}: use one of the columns {', '.join(rows.column_names)}")
        self._tokenizer, self._rows, self._column, self._system = tokenizer, rows, column, system

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row: Mapping[str, Any] = self._rows[index]
        question = row[self._column]
        if question is None:
            raise ValueError(f"its {self._column} is null")
        system = [] if self._system is None else [Message(role="system", content=self._system)]
        turns = [*system, Message(role="user", content=str(question)), Message(role="assistant", content="")]
        tokens = self._tokenizer({"messages": turns}, inference=True)["tokens"]
        return {**row, "tokens": tokens, "labels": list(tokens)}


def prompt_dataset(
    tokenizer: Any, *, source: str, column: str = "question", system: str | None = None, **options: Any
) -> Prompts:
    """Build a dataset of prompts; use it as `_component_` of `dataset`.

    Each value of `column` becomes a user message, after the `system` message if given. For models without a chat
    format, set the tokenizer's `prompt_template`. `options` are passed to `datasets.load_dataset`.
    """
    return Prompts(tokenizer, load_dataset(source, **options), column, system)
