"""Whisper small with Seq2SeqTrainer."""

# bytes: 241.7e6 * (4 + 4 + 8)
# note: cuDNN
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
    encoder_ffn_dim=3072, decoder_ffn_dim=3072,
)  # fmt: skip


class Audio(torch.utils.data.Dataset):
    """Silence."""

    def __len__(self):
        return 16

    def __getitem__(self, at):
        return {"input_features": torch.zeros(80, 3000), "labels": torch.ones(32, dtype=torch.long)}


arguments = Seq2SeqTrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no"
)
Seq2SeqTrainer(WhisperForConditionalGeneration(config), arguments, train_dataset=Audio()).train()
