"""DataParallel over all GPUs of one process."""

# command: --devices 2 -- SCRIPT
# bytes: 268.4e6 * (4 + 4 + 8 + 4)
import torch

model = torch.nn.DataParallel(torch.nn.Linear(16384, 16384).cuda(), device_ids=[0, 1])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(8, 16384).cuda()).sum().backward()
optimizer.step()
