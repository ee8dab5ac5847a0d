import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A property says nothing about time, and a busy machine must not make it fail.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every machine: who only wants to know whether it works here should not be the one to find a bug.
settings.register_profile("default", **PATIENT, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=3000)


@pytest.fixture(scope="module")
def imports_are_no_garbage() -> Iterator[None]:
    """A probe collects garbage; the fewer objects there are from before, the faster."""
    gc.freeze()
    yield
    gc.unfreeze()
