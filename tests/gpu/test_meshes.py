"""Out-of-memory errors under tensor parallelism and FSDP2 on GPUs: over NCCL with several, over gloo with one."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.models import gradients_equal, gradients_of, runner_of
from tests.fault_injection import FaultInjector
from tests.gpu.real_steps import use
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.results import Totals

ROWS, WIDTH, EVERY = 4, 64, 10
"""Memory runs out at every tenth operation."""


class Swept(NamedTuple):
    injected: int
    recovered: int
    bitwise: bool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(torch.relu(self.up(value)))


def sweep(name: str) -> Swept:
    """Collective: fail rank 1 at one operation after the other; compare gradients with undisturbed microbatches."""
    over_nccl = name == "cuda" and torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if over_nccl else "gloo", timeout=timedelta(seconds=120))
    device = torch.device("cuda", dist.get_rank()) if over_nccl else use(name)
    if over_nccl:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    mesh = init_device_mesh(name, (dist.get_world_size() // 2, 2), mesh_dim_names=("shards", "tensors"))
    model = nn.Sequential(Block(), Block()).to(device)
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensors"], plan)
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.stack([*samples])).square().sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    generator = torch.Generator().manual_seed(mesh["shards"].get_local_rank())
    samples = [*torch.randn(ROWS, WIDTH, generator=generator).to(device)]
    undisturbed = runner_of(model, ROWS // 2, forward_backward)
    undisturbed.run(samples, step=0)
    expected = {key: None if value is None else value.clone() for key, value in gradients_of(model).items()}
    undisturbed.close()
    injected = recovered = 0
    bitwise = True
    for operation in range(1, 10_000, EVERY):
        model.zero_grad(set_to_none=True)
        runner = runner_of(model, ROWS, forward_backward)
        with FaultInjector(runner).fail_at(rank=1, step=0, operation=operation) as faults:
            recoveries = runner.run(samples, step=0).recoveries
        fired = torch.tensor([faults.fired], device=device)
        dist.all_reduce(fired)
        runner.close()
        if not fired.item():
            break
        injected, recovered = injected + 1, recovered + recoveries
        bitwise = bitwise and gradients_equal(gradients_of(model), expected)
    dist.destroy_process_group()
    return Swept(injected, recovered, bitwise)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.real_gpu
def test_gradients_after_recoveries_under_tensor_parallelism_are_bitwise_equal(device: str, ranks: int) -> None:
    for swept in run_on_ranks(ranks, sweep, device, timeout_s=120, in_group=False):
        assert swept.injected > 5
        assert swept.recovered == swept.injected
        assert swept.bitwise
