"""An image model: Qwen2-VL 2B's shapes on one image of 28 × 28 patches."""

# bytes: 2.21e9 * (2 + 2 + 4 + 2)
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

config = Qwen2VLConfig(
    text_config={"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                 "num_attention_heads": 12,
                 "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    vision_config={"hidden_size": 1536, "embed_dim": 1280, "depth": 32},
    tie_word_embeddings=True,
)  # fmt: skip
model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
grid = torch.tensor([[1, 28, 28]])
tokens = torch.full((1, 256), 5)
tokens[0, 8 : 8 + 196] = config.image_token_id
for _ in range(3):
    batch = {
        "input_ids": tokens, "labels": tokens, "mm_token_type_ids": (tokens == config.image_token_id).int(),
        "image_grid_thw": grid, "pixel_values": torch.rand(784, 1176).to(torch.bfloat16),
    }  # fmt: skip
    model(**{name: value.cuda() for name, value in batch.items()}).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
