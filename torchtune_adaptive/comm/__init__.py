"""What ranks say to each other, and the insides of FSDP2: below `tune/`, only this room uses torch.distributed."""

from torchtune_adaptive.comm.collectives import Agreement, aside
from torchtune_adaptive.comm.fsdp import AllGather, ReduceScatter
from torchtune_adaptive.comm.ledger import CollectiveLedger
from torchtune_adaptive.comm.replicas_alike import make_replicas_alike

__all__ = [
    "Agreement",
    "AllGather",
    "CollectiveLedger",
    "ReduceScatter",
    "aside",
    "make_replicas_alike",
]
