"""Every rank has to have issued as many collectives as the others."""

from __future__ import annotations

import pytest

from torchtune_adaptive.engine.reports import Report, Reports
from torchtune_adaptive.errors import UnrecoverableError


def test_ranks_at_different_positions_end_the_run() -> None:
    Reports([Report(position=9), Report(position=9)]).check_positions()
    with pytest.raises(UnrecoverableError, match=r"\[9, 8\], by rank"):
        Reports([Report(position=9), Report(position=8)]).check_positions()
