"""Hangs that were reported to other projects, as short scripts with the same calls, and their fixes."""

from typing import NamedTuple

BEGINS = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(RANK % 8)
x = torch.ones(4, 16, device="cuda")
layer, counts, yes = torch.nn.Linear(16, 16, device="cuda"), [3, 0, 3], [True, True, True]
"""


class Bug(NamedTuple):
    """A known bug."""

    link: str
    ranks: int
    script: str
    fixed: tuple[str, str]
    """A part of the script, and by what the fix replaces it."""
    verdict: str
    cause: str


BUGS = {
    "shapes crossed between two stages": Bug(
        "https://github.com/NVIDIA/Megatron-LM/pull/5271", 2,
        """
other, P2P = 1 - RANK, dist.P2POp
to_next, to_previous = (torch.tensor([n], device="cuda") for n in ((512, 1536) if RANK == 0 else (1536, 512)))
from_next, from_previous = torch.empty_like(to_next), torch.empty_like(to_next)
previous = [P2P(dist.isend, to_previous, other), P2P(dist.irecv, from_previous, other)]
following = [P2P(dist.isend, to_next, other), P2P(dist.irecv, from_next, other)]
if RANK == 0:
    from_next.fill_(0)
for work in dist.batch_isend_irecv([*previous, *following]):
    work.wait()
received = torch.zeros(from_previous.item(), device="cuda")
received.expand(1536 if RANK == 0 else 512)
dist.barrier()
""",
        ("[*previous, *following]", "[previous[0], following[1], following[0], previous[1]]"),
        "no answer: the script failed",
        "",
    ),
    "stages that send before they receive": Bug(
        "https://github.com/pytorch/pytorch/issues/172668", 2,
        """
dist.barrier()
dist.send(x, 1 - RANK)
dist.recv(x, 1 - RANK)
torch.cuda.synchronize()
""",
        ("dist.send(x, 1 - RANK)\ndist.recv(x, 1 - RANK)",
         "[each.wait() for each in dist.batch_isend_irecv([dist.P2POp(f, x.clone(), 1 - RANK) "
         "for f in (dist.isend, dist.irecv)])]"),
        "hangs: rank 0 waits for rank 1 at train.py:13",
        "ranks send to each other before they receive: use batch_isend_irecv",
    ),
    "export of sharded weights on rank 0": Bug(
        "https://github.com/ISEEKYAN/Megatron-LM/pull/82", 2,
        """
def export(model, rank0_only):
    if rank0_only and RANK != 0:
        return
    for name, weight in model.named_parameters():
        yield name, weight.full_tensor()
[*export(fully_shard(layer), True)]
dist.barrier()
""",
        ("    if rank0_only and RANK != 0:\n        return\n", ""),
        "hangs: rank 0 waits for rank 1 at train.py:16",
        r"`if rank0_only and RANK != 0` at train.py:13 ends in a return, .*: rank 1 left there",
    ),
    "model saved on the main process": Bug(
        "https://github.com/pytorch/pytorch/issues/122903", 2,
        """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
model = fully_shard(layer)
is_main = RANK == 0
if is_main:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
dist.barrier()
""",
        ("if is_main:", "if True:"),
        "hangs: rank 0 waits for rank 1 at train.py:16",
        "only on rank 0, in the branch `if is_main` at train.py:15",
    ),
    "more batches on one rank": Bug(
        "https://github.com/pytorch/pytorch/issues/33148", 2,
        """
model = DistributedDataParallel(layer)
for batch in [x] * (3 + RANK):
    model(batch).sum().backward()
""",
        ("(3 + RANK)", "3"),
        "hangs: rank 1 waits for rank 0 at train.py:14",
        r"rank 0 left the loop `for batch in .*` at train.py:13 before rank 1: it has fewer batches",
    ),
    "barrier in a function for rank 0": Bug(
        "https://github.com/huggingface/transformers/pull/1081", 2,
        """
def load(evaluate):
    if RANK != 0:
        dist.barrier()
    if RANK == 0:
        dist.barrier()
load(evaluate=False)
if RANK == 0:
    load(evaluate=True)
for _ in range(2):
    dist.all_reduce(x)
""",
        ("if RANK != 0:\n        dist.barrier()\n    if RANK == 0:",
         "if RANK != 0 and not evaluate:\n        dist.barrier()\n    if RANK == 0 and not evaluate:"),
        "hangs: rank 0 waits for rank 1 at train.py:16",
        "^$|only on rank 0, in the branch `if RANK == 0` at train.py:18",
    ),
    "state dict gathered while the others wait": Bug(
        "https://github.com/huggingface/accelerate/issues/2690", 2,
        """
model = fully_shard(layer)
if RANK == 0:
    state = {name: each.full_tensor() for name, each in model.state_dict().items()}
else:
    dist.barrier()
""",
        ("if RANK == 0:\n    state", "if True:\n    state"),
        "hangs: rank 0 waits for rank 1 at train.py:14",
        "in the branch `if RANK == 0` at train.py:13",
    ),
    "different groups created at once": Bug(
        "https://github.com/pytorch/pytorch/issues/130102", 4,
        """
ranks = [0, 3] if RANK in (0, 3) else [1, 2]
group = dist.new_group(ranks)
dist.barrier(group=group)
""",
        ("dist.new_group(ranks)", "[dist.new_group(each) for each in ([0, 3], [1, 2])][RANK in (1, 2)]"),
        "hangs: ranks 0, 3 wait for ranks 1, 2 at train.py:13",
        "the ranks create different groups",
    ),
    "synchronization between two groups": Bug(
        "https://github.com/meta-pytorch/torchrec/pull/4149", 4,
        """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
order = ["replicate", "shard"] if RANK in (1, 2) else ["shard", "replicate"]
for name in order:
    dist.all_reduce(x, group=mesh.get_group(name))
    torch.cuda.synchronize()
""",
        ("if RANK in (1, 2)", "if RANK > 3"),
        "hangs: ",
        "communicators in different orders",
    ),
    "collective that Inductor moves before a message": Bug(
        "https://github.com/pytorch/pytorch/issues/189454", 2,
        """
from torch.distributed._functional_collectives import all_reduce
@torch.library.custom_op("rank::message", mutates_args=())
def message(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.batch_isend_irecv([dist.P2POp(dist.irecv if RANK else dist.isend, out, 1 - RANK)])[0].wait()
    return out
message.register_fake(torch.empty_like)
@torch.compile
def exchange(x, y):
    out = message(x)
    return out + all_reduce(out if RANK else y, "sum", dist.group.WORLD)
exchange(x, x + 1)
""",
        ("@torch.compile\n", ""),
        "hangs: rank 0 waits for rank 1 at train.py:19",
        "in different orders",
    ),
    "barrier on rank 0": Bug(
        "https://github.com/huggingface/transformers-bloom-inference/pull/40", 2,
        """
def print_rank0(text):
    if RANK == 0:
        print(text)
        dist.barrier()
print_rank0("loaded")
dist.broadcast(x, 0)
""",
        ("        dist.barrier()", "    dist.barrier()"),
        "hangs: rank 0 waits for rank 1 at train.py:15",
        "only on rank 0, in the branch `if RANK == 0` at train.py:13",
    ),
}  # fmt: skip
