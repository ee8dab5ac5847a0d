"""What all tests need of the process that they run in."""

import gc
import signal

import pytest

# A shell starts what it puts into the background with SIGINT ignored, and whatever is started from there inherits that:
# runs that are to be ended by Ctrl-C would not hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: processes to which files are dealt then end at about the same time."""
    items.sort(key=lambda item: "unit" in item.path.parts)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """A run collects garbage where it begins, a probe every time; torch and the tests are a lot to look through."""
    gc.collect()
    gc.freeze()
