import torch
from setting import RANK, sgd, sharded
from torch.utils.data import DataLoader, TensorDataset

model = sharded()
optimizer = sgd(model)
data = DataLoader(TensorDataset(torch.ones(2 + RANK % 2, 16)))
for (rows,) in data:
    model(rows.cuda()).sum().backward()  # here
    optimizer.step()
