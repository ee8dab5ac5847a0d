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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select what `make test` runs, and run slow tests first, so that all workers finish at about the same time."""
    items.sort(key=is_unit_test)
    for item in items:
        marker = item.get_closest_marker("smoke")
        if is_unit_test(item):
            item.add_marker("smoke")
        elif isinstance(item, pytest.Function) and marker and marker.args and item.callspec.id not in marker.args:
            item.own_markers.remove(marker)


def is_unit_test(item: pytest.Item) -> bool:
    return "unit" in item.path.parts


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """A run collects garbage where it begins, a probe every time; torch and the tests are a lot to look through."""
    gc.collect()
    gc.freeze()
