"""torch's Muon for matrices beside AdamW for the rest."""

# bytes: 201.3e6 * (4 + 4 + 4)
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(12)]).cuda()
matrices = [weight for weight in model.parameters() if weight.ndim == 2]
optimizers = [
    torch.optim.Muon(matrices),
    torch.optim.AdamW([weight for weight in model.parameters() if weight.ndim == 1]),
]
for _ in range(3):
    model(torch.rand(8, 4096, device="cuda")).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
