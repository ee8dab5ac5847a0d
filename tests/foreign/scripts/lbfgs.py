"""LBFGS, which is refused: the error states the size of its history."""

# refused: LBFGS
import torch

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.LBFGS(model.parameters())


def closure():
    """Return the loss."""
    optimizer.zero_grad()
    loss = model(torch.rand(8, 1024, device="cuda")).square().sum()
    loss.backward()
    return loss


optimizer.step(closure)
