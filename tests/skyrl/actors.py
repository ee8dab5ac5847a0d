"""SkyRL's workers as Ray actors on CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from torch import Tensor

from tests.skyrl.workers import KINDS, gradients, join_ranks, use_cpus


class PolicyOnCpu(KINDS["policy"]):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_cpus()
        super().__init__(*args, **kwargs)

    def init_worker_process_group(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        join_ranks(self)

    def gradients(self) -> list[Tensor]:
        return gradients(self)


PolicyActor = ray.remote(num_gpus=1)(PolicyOnCpu)
