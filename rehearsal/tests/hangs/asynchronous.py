import torch
import torch.distributed as dist
from setting import RANK, batch, layers, sgd

model = layers()
optimizer = sgd(model)
on_hosts = dist.new_group(backend="gloo")
for _ in range(2):
    model(batch()).sum().backward()
    reductions = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
    logged = dist.all_reduce(torch.ones(1), group=on_hosts, async_op=True)
    if RANK == 0:  # the order of waiting is free
        logged.wait()
    for reduction in reversed(reductions):
        reduction.wait()
    if RANK > 0:
        logged.wait()
    optimizer.step()
