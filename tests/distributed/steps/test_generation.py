"""Generated tokens in one process. tests/recipes/ppo shows that they do not depend on the split or the number of ranks,
and tests/distributed/faults has generation as a stage.
"""

import pytest
import torch
from torchtune.generation import generate as generate_as_torchtune

from tests.distributed.models import ModelConfig, build
from torchtune_adaptive.rl.generation import draws, generate

NEW = 5
HOST = {"device": torch.device("cpu"), "dtype": torch.float32}


def test_most_probable_tokens_are_those_of_torchtune():
    model = build(ModelConfig(sharded=False)).eval()
    prompt = torch.arange(1, 7)
    expected, _ = generate_as_torchtune(model, prompt, max_generated_tokens=NEW, pad_id=-1, top_k=1)
    found = generate(model, [prompt, prompt[:3]], torch.zeros(2, NEW), top_k=1, **HOST)
    assert found[0].tolist() == expected[0, len(prompt) :].tolist()


def test_padding_follows_a_stop_token():
    model, prompt = build(ModelConfig(sharded=False)), torch.arange(1, 7)
    drawn = draws([(0,)], NEW)
    free = generate(model, [prompt], drawn, **HOST)[0].tolist()
    stopped = generate(model, [prompt], drawn, stop_tokens=(free[1],), pad_id=63, **HOST)[0].tolist()
    end = free.index(free[1])
    assert stopped == [*free[: end + 1], *[63] * (NEW - end - 1)]


def test_partly_created_caches_are_removed():
    model = build(ModelConfig(sharded=False))
    model.layers[-1].setup_caches = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("mine"))
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, [torch.arange(3)], torch.zeros(1, NEW), **HOST)
    assert all(layer.attn.kv_cache is None for layer in model.layers)
    assert model.training
