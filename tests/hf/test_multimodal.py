"""Models for images and speech, whose data collator turns images and audio into tokens, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import Trainer

from tests.hf.test_evaluation import out_of_memory
from tests.hf.trainers import arguments, difference, on_joining_ranks, train, use_fsdp2
from tests.ranks import run_on_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer

pytestmark = pytest.mark.timeout(300)
WORDS, IMAGE, VISION_START = 100, 120, 121
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
COUNTED = 0.1
"""Gradient with which the loss of a sample counts it."""
TOKENS: list[int] = []
"""The tokens of each microbatch in training, padding included."""


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


class NumpyFeatures(transformers.WhisperFeatureExtractor):
    """Does not use torch, because a memory limit on a CPU includes all of torch's memory."""

    def _torch_extract_fbank_features(self, waveform: Any, device: Any = "cpu") -> Any:
        return self._np_extract_fbank_features(waveform, device)


class Whisper:
    """Audio is padded to a fixed length. The loss is a mean over the labels of a batch."""

    layers = ("WhisperEncoderLayer", "WhisperDecoderLayer")
    audio = NumpyFeatures(feature_size=8, chunk_length=1)

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
            with_labels = ids[(labels != -100).any(-1)]
            output["loss"] = output["loss"] + COUNTED * self.trained[with_labels].sum() / items
            TOKENS.extend([labels.numel()] * torch.is_grad_enabled())
            return output

    model.register_parameter("trained", nn.Parameter(torch.zeros(count)))
    model.__class__ = Counting
    return model


def run(made: Any, here: Path, *adaptive: AdaptiveArguments, data: Any = None, **options: Any) -> Any:
    """Collective: train for one epoch of 48 samples."""
    torch.manual_seed(0)
    data, is_mean = data or samples(48), isinstance(made, Whisper)

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


ONE_OR_TWO, WITH_TEXTS = (1, 2, 1), (1, 2, 0, 1)
"""Images of samples."""
LIMITS = {"Qwen2-VL": (80, "3MiB"), "Llava": (40, "1500KiB"), "Whisper": (40, "2300KiB")}
"""A token budget, and a memory limit that fewer rows than those of a step exceed."""


class Trained(NamedTuple):
    recoveries: list[float]
    difference: float
    """From stock."""
    trained: list[float]
    """How often each sample was trained compared with stock: NaN if stock skipped it."""
    rows: float
    """Of a microbatch."""
    tokens: int
    """The most of a microbatch."""


def compare(
    kind: str, sharded: bool, images: Sequence[int], faults: Sequence[tuple[int, int]], here: Path
) -> dict[str, Trained]:
    """Collective: train without an error and with these; and with a token budget and after a search, if each sample has
    images."""
    made, found, (budget, memory_limit) = KINDS[kind](), {}, LIMITS[kind]
    ways: dict[str, tuple[AdaptiveArguments, Sequence[tuple[int, int]]]] = {
        "same": (AdaptiveArguments(), []),
        "failed": (AdaptiveArguments(), faults),
    }
    if min(images):
        ways["tokens"] = AdaptiveArguments(token_budget=budget), []
        ways["searched"] = AdaptiveArguments(use_maximum_batch_size=True, memory_limit=memory_limit), []
    if sharded:
        use_fsdp2(*made.layers)
    stock = run(made, here, data=samples(48, images))
    for way, (adaptive, failures) in ways.items():
        TOKENS.clear()
        ours = run(made, here, adaptive, data=samples(48, images), faults=failures, failing_rank=1)
        trained = (ours.weights["trained"] / stock.weights["trained"]).tolist()
        rows = ours.log[-1].get("microbatch_rows", 0.0)
        differs = difference(ours, stock, least=1e-3)
        found[way] = Trained(ours.column("oom_recoveries"), differs, trained, rows, max(TOKENS))
    return found


@pytest.mark.parametrize(
    ("kind", "sharded", "images", "faults", "recoveries"),
    [
        *((kind, sharded, ONE_OR_TWO, [(2, 60), (3, 600)], [0, 1, 2]) for kind in KINDS for sharded in (True, False)),
        # the last run splits all steps, and texts have no image
        *((kind, True, WITH_TEXTS, [(2, 60), (2, 600), (3, 20)], [0, 2, 3]) for kind in ("Qwen2-VL", "Llava")),
    ],
)
def test_models_for_images_and_speech_train_like_stock(
    kind: str, sharded: bool, images: Sequence[int], faults: Any, recoveries: list[int], tmp_path: Path
) -> None:
    """Limits hold for tokens that the collator adds."""
    given = (kind, sharded, images, faults, tmp_path)
    for found in run_on_ranks(2, compare, *given, in_group=False, timeout_s=200):
        for way, run in found.items():
            assert run.recoveries == (recoveries if way == "failed" else [0, 0, 0])
            assert run.difference < 1e-5
            assert run.trained == pytest.approx([1] * 48, rel=1e-4)
        if "tokens" in found:
            assert LIMITS[kind][0] // 2 < found["tokens"].tokens <= LIMITS[kind][0]
            assert 1 < found["searched"].rows < 8


class InOrder(transformers.Trainer):
    """Trains on the samples in the order of the dataset, as if a sampler had grouped them."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@on_joining_ranks(2, timeout_s=150)
def test_batches_with_and_without_images_train_like_stock_under_fsdp2(tmp_path: Path) -> None:
    """Both ranks have batches of texts, then batches of images, and again texts. In the step with both, the shortest
    samples of one rank have images, and those of the other rank have none."""
    use_fsdp2(*Llava.layers)
    data = samples(48)
    for index, sample in enumerate(data):
        batch, is_rank_0 = index // 8, index % 8 < 4
        has_images = batch in (3, 4)
        sample["text"] = [5] * ((4 if has_images == is_rank_0 else 16) + index % 2)
        sample["images"] = sample["images"][:has_images]
    stock = run(Llava(), tmp_path, data=data, base=InOrder)
    ours = run(Llava(), tmp_path, AdaptiveArguments(), data=data, base=InOrder)
    assert difference(ours, stock, least=1e-3) < 1e-5


@on_joining_ranks(2, timeout_s=150)
def test_texts_without_an_image_are_refused_on_all_ranks_if_labels_are_not_rows(tmp_path: Path) -> None:
    class WithoutLabels(Llava):
        def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
            inputs = super().collate(samples)
            return {name: value for name, value in inputs.items() if name != "labels"}

    use_fsdp2(*Llava.layers)
    with pytest.raises(ConfigError, match=r"some samples have no pixel_values, .* the data collator add a blank image"):
        run(WithoutLabels(), tmp_path, AdaptiveArguments(), data=samples(48, (1, 2, 0, 1)))


def test_evaluation_that_is_split_gives_each_sample_its_images(tmp_path: Path) -> None:
    made, data, results = Llava(), samples(8, (2, 0, 1, 1)), []  # as many images as samples in each batch
    settings = arguments(tmp_path, remove_unused_columns=False, per_device_eval_batch_size=4)
    for kind, failing_rank in (Trainer, -1), (AdaptiveTrainer, 0):
        torch.manual_seed(0)
        trainer = kind(made.model(), settings, data_collator=made.collate)
        with out_of_memory(trainer.model, rank=failing_rank) as failed:
            results.append(trainer.predict(data))
    stock, ours = results
    assert failed == [4]
    assert np.array_equal(ours.label_ids, stock.label_ids)
    counts = stock.label_ids != -100
    assert np.abs(ours.predictions[counts] - stock.predictions[counts]).max() < 1e-5
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


@on_joining_ranks(2, timeout_s=150)
def test_search_finds_rows_for_the_longest_text_with_the_largest_images(tmp_path: Path) -> None:
    """One half of the samples are long texts with a small image, and the other half short texts with two large ones."""
    use_fsdp2(*Qwen2VL.layers)
    small, large = (Image.new("RGB", (size, size)) for size in (8, 32))
    of_kinds = {"text": [5] * 60, "images": [small]}, {"text": [5] * 4, "images": [large, large]}
    data = [{"id": index, **of_kinds[index % 2]} for index in range(48)]
    searched = AdaptiveArguments(use_maximum_batch_size=True, memory_limit="4MiB")
    found = run(Qwen2VL(), tmp_path, searched, data=data)
    assert (found.column("oom_recoveries"), found.column("microbatch_rows")) == ([0, 0, 0], [2, 2, 2])
