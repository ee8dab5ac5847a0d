"""A mixture of experts: two of Mixtral's layers in bf16, load-balancing loss included."""

# bytes: 3.1646e9 * (2 + 2 + 4 + 2)
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

config = MixtralConfig(num_hidden_layers=2, output_router_logits=True)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(32000, (1, 256)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
