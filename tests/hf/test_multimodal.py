"""Models for images and speech, whose data collator turns images and audio into tokens, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.hf.trainers import arguments, difference, train, use_fsdp2
from tests.ranks import run_on_ranks
from torchtune_adaptive.hf import AdaptiveArguments

pytestmark = pytest.mark.timeout(300)
WORDS, IMAGE, VISION_START = 100, 120, 121
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
COUNTED = 0.1
"""Gradient with which the loss of a sample counts it."""


class Qwen2VL:
    """The patches of all images of a batch are concatenated. An image has as many tokens as its size requires."""

    layers = ("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock")
    images = transformers.Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=1024)

    def model(self) -> Any:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
        ids = {"image_token_id": IMAGE, "vision_start_token_id": VISION_START, "video_token_id": VISION_START + 1}
        text = {**TEXT, "rope_parameters": rope, "tie_word_embeddings": False}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        return transformers.Qwen2VLForConditionalGeneration(config)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        images = [each for sample in samples for each in sample["images"]]
        patches = self.images(images, return_tensors="pt") if images else {"image_grid_thw": torch.zeros(0, 3)}
        tokens = iter([[VISION_START, *[IMAGE] * int(size.prod() // 4)] for size in patches["image_grid_thw"]])
        rows = [[*chain(*(next(tokens) for _ in sample["images"])), *sample["text"]] for sample in samples]
        inputs = texts(rows)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
        return {**inputs, **(patches if images else {})}


class Llava:
    """All images have the same size after processing, and the same number of tokens."""

    layers = ("LlamaDecoderLayer", "CLIPEncoderLayer")
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})

    def model(self) -> Any:
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=32),
            image_token_id=IMAGE,
            vision_feature_layer=-1,
        )
        # Its image_hidden_states have no row for each sample, so a batch of them cannot be split.
        config.keys_to_ignore_at_inference = ["past_key_values", "image_hidden_states"]
        return transformers.LlavaForConditionalGeneration(config)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = texts([[*[IMAGE] * 4 * len(sample["images"]), *sample["text"]] for sample in samples])
        images = [each for sample in samples for each in sample["images"]]
        return {**inputs, **(self.images(images, return_tensors="pt") if images else {})}


class Whisper:
    """Audio is padded to a fixed length. The loss is a mean over the labels of a batch."""

    layers = ("WhisperEncoderLayer", "WhisperDecoderLayer")
    audio = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)

    def model(self) -> Any:
        sizes = {"vocab_size": 128, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 50}
        parts = {
            f"{part}_{name}": value
            for part in ("encoder", "decoder")
            for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 64}.items()
        }
        config = transformers.WhisperConfig(**sizes, **parts, **IDS, max_target_positions=32, use_cache=False)
        return transformers.WhisperForConditionalGeneration(config)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        audio = self.audio([sample["audio"] for sample in samples], sampling_rate=16_000, return_tensors="pt")
        return {**audio, "labels": texts([sample["text"] for sample in samples])["labels"]}


KINDS = {"Qwen2-VL": Qwen2VL, "Llava": Llava, "Whisper": Whisper}


def texts(rows: Sequence[list[int]]) -> dict[str, Tensor]:
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where((ids > 0) & (ids < WORDS), -100)}


def samples(count: int, images: Sequence[int] = (1, 2, 1)) -> list[dict[str, Any]]:
    """Return texts, images and audio of different lengths and sizes."""
    random = np.random.default_rng(0)

    def image() -> Image.Image:
        height, width = random.integers(8, 30, 2)
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return [
        {
            "id": index,
            "text": random.integers(3, WORDS, random.integers(4, 20)).tolist(),
            "images": [image() for _ in range(images[index % len(images)])],
            "audio": random.standard_normal(random.integers(2_000, 16_000)).astype(np.float32),
        }
        for index in range(count)
    ]


def counting(model: Any, count: int, *, is_mean: bool) -> Any:
    """Add a parameter per sample to a model. Its gradient counts how often the sample has been trained."""

    class Counting(type(model)):  # type: ignore[misc]
        @wraps(type(model).forward)
        def forward(self, *, ids: Tensor, **inputs: Any) -> Any:
            output, (items, labels) = super().forward(**inputs), (inputs.get("num_items_in_batch"), inputs["labels"])
            if is_mean or items is None:
                items = (labels != -100).sum()
            output["loss"] = output["loss"] + COUNTED * self.trained[ids].sum() / items
            return output

    model.register_parameter("trained", nn.Parameter(torch.zeros(count)))
    model.__class__ = Counting
    return model


def run(made: Any, here: Path, *adaptive: AdaptiveArguments, **options: Any) -> Any:
    """Collective: train for one epoch of 48 samples."""
    torch.manual_seed(0)
    data, is_mean = samples(48), isinstance(made, Whisper)

    def collate(batch: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        return {**made.collate(batch), "ids": torch.tensor([sample["id"] for sample in batch])}

    settings = arguments(
        here,
        max_steps=3,
        learning_rate=0.05,
        max_grad_norm=1e9,  # logs the norm without clipping
        remove_unused_columns=False,
        per_device_train_batch_size=8 if is_mean else 4,
        gradient_accumulation_steps=1 if is_mean else 2,
    )
    given = {"model": counting(made.model(), len(data), is_mean=is_mean), "train_dataset": data}
    return train(here, *adaptive, arguments=settings, data_collator=collate, **given, **options)


def compare_training(kind: str, sharded: bool, here: Path) -> list[tuple[list[float], float, list[float]]]:
    """Collective: return the recoveries, the difference from stock, and how often each sample was trained compared with
    stock; without an error, and with one in each of two steps."""
    made = KINDS[kind]()
    if sharded:
        use_fsdp2(*made.layers)
    stock, found = run(made, here), []
    for faults in ([], [(2, 60), (3, 600)]):
        ours = run(made, here, AdaptiveArguments(), faults=faults, failing_rank=1)
        trained = (ours.weights["trained"] / stock.weights["trained"]).tolist()  # NaN if stock skipped a sample
        found.append((ours.column("oom_recoveries"), difference(ours, stock, least=1e-3), trained))
    return found


PLACEMENTS = pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2", "DDP"])


@PLACEMENTS
@pytest.mark.parametrize("kind", KINDS)
def test_models_for_images_and_speech_train_like_stock(kind: str, sharded: bool, tmp_path: Path) -> None:
    found, same = run_on_ranks(2, compare_training, kind, sharded, tmp_path, in_group=False, timeout_s=60)
    assert found == same
    assert [recoveries for recoveries, *_ in found] == [[0, 0, 0], [0, 1, 2]]
    for _, differs, trained in found:
        assert differs < 1e-5
        assert trained == pytest.approx([1] * 48, rel=1e-4)
