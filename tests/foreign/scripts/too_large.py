"""A model that is too large for the card."""

# command: --gpu 4090 -- SCRIPT
# out of memory
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(32)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(8, 8192, device="cuda")).sum().backward()
optimizer.step()
