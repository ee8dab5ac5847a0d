"""What all tests need of the process that they run in."""

import gc
import signal

import pytest

# A shell starts what it puts into the background with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and whatever is
# started from there inherits that: runs that are to be ended by them would not hear it.
DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for number, default in DEFAULTS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: processes to which files are dealt then end at about the same time."""
    items.sort(key=lambda item: "unit" in item.path.parts)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """A run collects garbage where it begins, a probe every time; torch and the tests are a lot to look through."""
    gc.collect()
    gc.freeze()
