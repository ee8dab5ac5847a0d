"""Wav2Vec2 base with a CTC loss on clips of different lengths; the feature encoder is frozen."""

# bytes: 94.4e6 * (4 + 4 + 8) + 8 * 512 * 51199 * 4 * 3
import numpy
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCTC, Trainer, TrainingArguments, Wav2Vec2FeatureExtractor

extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
random = numpy.random.default_rng(0)
clips = [random.standard_normal(length).astype("float32") for length in (256000, *random.integers(80000, 256000, 47))]
data = Dataset.from_dict({"input_values": clips, "labels": random.integers(1, 32, (48, 40)).tolist()})


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    padded = extractor.pad([{"input_values": row["input_values"]} for row in rows], padding=True, return_tensors="pt")
    return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


model = AutoModelForCTC.from_config(AutoConfig.for_model("wav2vec2", vocab_size=32, ctc_loss_reduction="mean"))
model.freeze_feature_encoder()
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, fp16=True, max_steps=6, report_to=[], save_strategy="no"
)
Trainer(model, arguments, data_collator=collate, train_dataset=data).train()
