"""A GPT-2 124M loop in the manner of nanoGPT: compiled, autocast, fused AdamW, accumulation of two batches."""

# bytes: 124.4e6 * (4 + 4 + 8) + 2 * 1024 * 50257 * 4 * 2
# at most: 1.5
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_float32_matmul_precision("high")
model = torch.compile(GPT2LMHeadModel(GPT2Config()).cuda())
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    for _ in range(2):
        tokens = torch.randint(50257, (2, 1024)).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(loss.item())
