"""DTensor: a pass that runs out of memory inside a sharded embedding leaves its mask behind, and the next pass fails.

    python mask_buffer.py

One process, no GPU: rank 0 of a fake process group of two. Prints what becomes of a second lookup, with other tokens of
the same shape, after a first one was interrupted between masking its tokens and reducing its output. Expected: nothing.
Seen with torch 2.13.0: "RuntimeError: MaskBuffer has been materialized with conflicting data".

The mask lives in a MaskBuffer of the _MaskPartial placement, which sits in DTensor's cache of sharding decisions. Only
the reduction over the ranks releases it. Whoever catches torch.OutOfMemoryError under tensor parallelism and goes on
with a smaller batch meets it as soon as a batch has that shape again. With the same tokens the reference count stays
too high instead, and the next other tokens fail.

What is printed to stderr besides is that the interrupted lookups have left collectives that nobody waited for.

What would mend it: keep the mask with the DTensor that is the output of the lookup, not with the cached placement.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemoryAfterLookup(TorchDispatchMode):
    """The first operation on plain tensors after the lookup itself raises, as any allocation may."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, which comes back with what it does inside
        if self.looked_up:
            raise torch.OutOfMemoryError("injected")
        self.looked_up = func is torch.ops.aten.embedding.default
        return func(*args, **(kwargs or {}))


def second_lookup(*, interrupt_the_first: bool) -> str:
    """What becomes of it."""
    mesh = init_device_mesh("cpu", (2,))
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    embedding = parallelize_module(nn.Embedding(8, 4), mesh, plan)
    embedding(torch.tensor([[3, 4, 5]]))  # DTensor has decided by now how it shards a lookup of this shape
    if interrupt_the_first:
        try:
            with OutOfMemoryAfterLookup():
                embedding(torch.tensor([[0, 1, 2]]))
        except torch.OutOfMemoryError:
            pass
    else:
        embedding(torch.tensor([[0, 1, 2]]))
    try:
        embedding(torch.tensor([[5, 6, 7]]))
    except RuntimeError as error:
        return f"fails: {error}"
    return "runs"


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    print("after a whole lookup, the second", second_lookup(interrupt_the_first=False))
    print("after an interrupted one, the second", second_lookup(interrupt_the_first=True))
    dist.destroy_process_group()
