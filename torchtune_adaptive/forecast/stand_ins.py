"""What a forecast gives a recipe in place of weights, a tokenizer and data. Each takes the keys of what it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset
from torchtune import training

from torchtune_adaptive.tune.model import Unfilled
from torchtune_adaptive.tune.samples import PAIR, TEXT

TOKEN = 1
"""Any that a model knows, and no padding."""


class NoWeights:
    """A checkpointer without files."""

    def __init__(self, **_: Any) -> None:
        """Ignores what says where files are."""

    def load_checkpoint(self) -> dict[str, Any]:
        return {training.MODEL_KEY: Unfilled()}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing has been trained."""


class NoTokenizer:
    pad_id, eos_id, bos_id = 0, 0, TOKEN
    stop_tokens = (0,)

    def __init__(self, max_seq_len: int, **_: Any) -> None:
        self.max_seq_len = max_seq_len

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def worth(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that no two answers share, so that all of them count."""
    return [float(place) for place in range(len(completions))]


class MadeUp(Dataset[dict[str, Any]]):
    """As many samples as are asked for, of these lengths in turn; each has what any recipe asks of a sample."""

    def __init__(self, tokenizer: Any, *, lengths: Sequence[int], samples: int) -> None:
        self._lengths, self._samples = list(lengths), samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self._lengths[index % len(self._lengths)]
        sample: dict[str, Any] = {"mask": [False] * length}
        for fields in (*TEXT.sequences, *PAIR.sequences):
            sample |= {fields.tokens: [TOKEN] * length, fields.labels: [TOKEN] * length}
        return sample
