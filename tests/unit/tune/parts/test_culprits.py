"""Which sample made a run fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtune_adaptive.errors import SampleError
from torchtune_adaptive.tune.parts.culprits import NamedSamples, naming_unknown_tokens


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(4, 2)


def look_up(samples: list[dict[str, list[int]]]) -> None:
    Decoder().tok_embeddings(torch.tensor([(sample["tokens"][-1], sample["labels"][-1]) for sample in samples]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"text": "x"}, "sample 1 of the dataset .* has no tokens or no labels"),
        ({"tokens": [1]}, "sample 1 of the dataset .* has no tokens or no labels"),
        ({"tokens": [1, 4], "labels": [1, 1]}, "sample 1 of the dataset has token 4"),
    ],
)
def test_a_sample_that_no_microbatch_can_be_made_of_is_named(wrong: dict[str, object], says: str) -> None:
    samples = NamedSamples([{"tokens": [1], "labels": [1]}, wrong])
    with pytest.raises(SampleError, match=says), naming_unknown_tokens(Decoder(), samples, last=2):
        look_up([samples[0], samples[1]])


def test_a_failure_that_no_sample_explains_is_left_as_it_is() -> None:
    samples = NamedSamples([{"tokens": [1], "labels": [1]}])
    with pytest.raises(RuntimeError, match="elsewhere"), naming_unknown_tokens(Decoder(), samples, last=1):
        raise RuntimeError(f"elsewhere {samples[0]}")
