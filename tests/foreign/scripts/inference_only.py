"""Evaluation without an optimizer: Mixtral 8x7B's layers, four of them, in bf16."""

# bytes: 6.07e9 * 2
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

model = AutoModelForCausalLM.from_config(MixtralConfig(num_hidden_layers=4), dtype=torch.bfloat16).cuda().eval()
with torch.no_grad():
    for _ in range(3):
        tokens = torch.randint(32000, (4, 512)).cuda()
        print(model(input_ids=tokens, labels=tokens).loss.item())
