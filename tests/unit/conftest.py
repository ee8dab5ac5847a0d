from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# A property says nothing about time, and a busy machine must not make it fail.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every machine: who only wants to know whether it works here should not be the one to find a bug.
settings.register_profile("default", **PATIENT, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=3000)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
