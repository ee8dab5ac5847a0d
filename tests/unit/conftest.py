import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A property says nothing about time, and a busy machine must not make it fail.
settings.register_profile("default", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)


@pytest.fixture(scope="module")
def imports_are_no_garbage() -> Iterator[None]:
    """A probe collects garbage; the fewer objects there are from before, the faster."""
    gc.freeze()
    yield
    gc.unfreeze()
