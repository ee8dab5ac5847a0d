"""What the tests' own ranks are given, without which the tests would take much longer or get in each other's way."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.ranks import free_ports, run_on_ranks


def had_before() -> tuple[bool, int]:
    return "torchtune_adaptive.tune.fit" in sys.modules, gc.get_freeze_count()


def test_a_rank_has_everything_imported_and_does_not_look_through_it_for_garbage() -> None:
    [(imported, frozen)] = run_on_ranks(1, had_before)
    assert imported
    assert frozen > 100_000


def test_processes_that_test_side_by_side_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        assert {port % 3 for port in free_ports(50)} == {worker}
