"""Each test runs its body in a separate process on a null device."""

from collections.abc import Iterator

import pytest

from tests.null.processes import OnNull, null_processes, skip_without_null_device


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Skip these tests if null devices are unavailable."""
    skip_without_null_device()


@pytest.fixture(scope="session")
def on_null(library: None) -> Iterator[OnNull]:
    with null_processes() as found:
        yield found
