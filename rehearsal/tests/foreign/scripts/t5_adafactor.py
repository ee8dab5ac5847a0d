"""T5 base with Adafactor."""

# bytes: 222.9e6 * (4 + 4)
import torch
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

model = T5ForConditionalGeneration(
    T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
).cuda()
optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
for _ in range(3):
    tokens = torch.randint(32000, (2, 128)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
