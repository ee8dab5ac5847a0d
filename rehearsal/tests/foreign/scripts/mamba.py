"""Mamba 130M without its custom kernels."""

# bytes: 129.1e6 * (4 + 4 + 8 + 4)
import torch
from transformers import MambaConfig, MambaForCausalLM

model = MambaForCausalLM(MambaConfig(hidden_size=768, num_hidden_layers=24)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    tokens = torch.randint(50000, (1, 32)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
