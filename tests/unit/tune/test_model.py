"""Models as a config names them."""

import pytest

from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.tune import model


def test_a_layer_that_no_module_is_called_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(model, "say", lines.append)
    model.tell_ignored_layers(demo_model(), ["output", "tok_embedings"])
    assert lines == [
        "custom_sharded_layers · tok_embedings is ignored: the model has no such module; did you mean tok_embeddings?"
    ]
