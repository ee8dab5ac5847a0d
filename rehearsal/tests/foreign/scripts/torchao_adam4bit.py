"""torchao's 4-bit AdamW."""

# bytes: 268.5e6 * (2 + 2 + 1)
# at most: 1.35
import torch
from torchao.optim import AdamW4bit

model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(16)]).cuda()
optimizer = AdamW4bit(model.parameters())
for _ in range(3):
    model(torch.rand(8, 4096, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
