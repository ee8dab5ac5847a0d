from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
for step in range(4):
    if RANK == 1 and step == 2:
        raise ValueError("a sample is empty")  # here
    model(batch()).sum().backward()
    optimizer.step()
