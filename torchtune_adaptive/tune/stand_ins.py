"""Stand-ins for checkpointer, tokenizer and dataset, for rehearsals with `--without-data`.

Each accepts the arguments of what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune import training

from torchtune_adaptive.checkpoints.store import RECIPE_STATE, RECIPE_STATE_FILE
from torchtune_adaptive.tune.model import Unfilled
from torchtune_adaptive.tune.samples import PAIR, TEXT

TOKEN = 1
"""A token that every vocabulary contains, and that is not the padding token."""


class NoWeights:
    """A checkpointer that reads and writes no values."""

    def __init__(self, output_dir: str, **_: Any) -> None:
        self._folder = Path(output_dir)

    def load_checkpoint(self) -> dict[str, Any]:
        """Return a marker, with which parameters are allocated but not initialized."""
        return {training.MODEL_KEY: Unfilled()}

    def save_checkpoint(self, *_: Any, epoch: int, **__: Any) -> None:
        """Create the folder of torchtune's weights and an empty file of the recipe's state."""
        for folder in f"epoch_{epoch}", RECIPE_STATE:
            (self._folder / folder).mkdir(parents=True, exist_ok=True)
        (self._folder / RECIPE_STATE / RECIPE_STATE_FILE).touch()


class NoTokenizer:
    """A tokenizer without vocabulary."""

    pad_id, eos_id, bos_id = 0, 0, TOKEN
    stop_tokens = (0,)

    def __init__(self, max_seq_len: int, **_: Any) -> None:
        self.max_seq_len = max_seq_len


class SyntheticDataset(Dataset[dict[str, Any]]):
    """Generates samples with the fields of all recipes; their lengths cycle through `lengths`."""

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
