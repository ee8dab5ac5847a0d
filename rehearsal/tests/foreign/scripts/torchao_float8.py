"""torchao's float8 training, compiled."""

# bytes: 268.5e6 * (2 + 2 + 4 + 2)
import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(16)]).cuda()
model = torch.compile(convert_to_float8_training(model))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.rand(64, 4096, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
