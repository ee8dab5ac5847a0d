"""Count collectives."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ALL_REDUCE = "c10d.allreduce_.default"
"""FSDP2 never uses it for parameters: it is an agreement or a reduction of figures."""
REDUCE_SCATTER = "c10d._reduce_scatter_base_.default"


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))
