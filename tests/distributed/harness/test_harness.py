"""Test properties of the helpers whose loss would go unnoticed."""

import os
import time

import pytest

from tests import ranks
from tests.ranks import RanksHung, run_on_ranks


def sleep_on_rank_1(seconds: float) -> int:
    time.sleep(seconds * int(os.environ["RANK"]))
    return 0


def test_a_hung_rank_ends_the_test_and_a_slow_one_on_a_loaded_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "patience", lambda: 1.0)
    with pytest.raises(RanksHung, match=r"ranks \[1\]"):
        run_on_ranks(2, sleep_on_rank_1, 60.0, timeout_s=1, in_group=False)
    monkeypatch.setattr(ranks, "patience", lambda: 30.0)
    assert run_on_ranks(2, sleep_on_rank_1, 4.0, timeout_s=1, in_group=False) == [0, 0]
