import torch
import torch.distributed as dist
from setting import RANK, RANKS, layers, sgd
from torch.distributed.nn.functional import all_to_all_single

expert = layers()
optimizer = sgd(expert)
for _ in range(2):
    sent = torch.tensor([1 + (RANK + peer) % 3 for peer in range(RANKS)]).cuda()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    splits = sent.tolist(), received.tolist()
    tokens = torch.ones(sum(splits[0]), 16, device="cuda")
    arrived = all_to_all_single(torch.empty(sum(splits[1]), 16, device="cuda"), tokens, splits[1], splits[0])
    returned = all_to_all_single(torch.empty_like(tokens), expert(arrived), splits[0], splits[1])
    returned.sum().backward()
    optimizer.step()
