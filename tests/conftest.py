"""Set up the process of all tests."""

import gc
import signal

import pytest

# A shell starts background jobs with SIGINT and SIGQUIT ignored, nohup ignores SIGHUP, and child processes inherit
# this. Runs under test have to receive these signals.
DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for number, default in DEFAULTS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select what `make test` runs, and run slow tests first, so that all workers finish at about the same time."""
    items.sort(key=is_unit_test)
    missing: set[tuple[str, str]] = set()
    collected: set[tuple[str, str]] = set()
    for item in items:
        marker = item.get_closest_marker("smoke")
        if is_unit_test(item):
            item.add_marker("smoke")
        elif isinstance(item, pytest.Function) and marker and marker.args:
            test = item.nodeid.partition("[")[0]
            missing |= {(test, case) for case in marker.args}
            collected.add((test, item.callspec.id))
            if item.callspec.id not in marker.args:
                item.own_markers.remove(marker)
    if (missing := missing - collected) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"smoke names cases that do not exist: {sorted(missing)}")


def is_unit_test(item: pytest.Item) -> bool:
    return "unit" in item.path.parts


@pytest.fixture(scope="module", autouse=True)
def freeze_imports() -> None:
    """Keep imported modules out of garbage collection: every probe collects, and torch and the tests are large."""
    gc.collect()
    gc.freeze()
