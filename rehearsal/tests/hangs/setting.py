"""What the scripts of this folder share: ranks on GPUs, and tiny models."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(RANK)


def layers() -> nn.Sequential:
    """Return a model of two layers."""
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()


def sharded(**options: object) -> nn.Sequential:
    """Return the model under FSDP2."""
    model = layers()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters())


def batch() -> Tensor:
    """Return four rows."""
    return torch.ones(4, 16, device="cuda")
