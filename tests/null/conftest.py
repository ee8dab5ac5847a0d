"""Each test runs its body in a process of its own on a null device."""

from collections.abc import Iterator

import pytest

from tests.null.processes import OnNull, null_processes, skip_without_null_device


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """What it takes; without it, all of these tests are skipped."""
    skip_without_null_device()


@pytest.fixture(scope="session")
def on_null(library: None) -> Iterator[OnNull]:
    with null_processes() as found:
        yield found
