from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# Properties do not depend on time, and must not fail on a busy machine.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# Use the same examples on every machine, so that checking an installation does not find new bugs.
settings.register_profile("default", **PATIENT, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=3000)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
