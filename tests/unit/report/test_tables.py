"""The table of a search."""

from tests.simulated_memory import always_fits
from torchtune_adaptive.engine.search import Budget, Peak, search
from torchtune_adaptive.report.tables import search_table

GIB = 2**30


def test_table_is_the_documented_one() -> None:
    def measure(rows: int) -> Peak:
        peak, seconds = {1: (38.4, 1.9), 2: (42.9, 2.2), 8: (69.7, 5.8)}[rows]
        return Peak({"backward": int(peak * GIB)}, fits=True, seconds=seconds)

    found = search(measure, Budget(int(75.2 * GIB)), no_fit_error=always_fits)
    assert search_table(found, 4096) == (
        "batch search · linear · 4096 tokens · budget 75.2 GiB a rank\n"
        "  rows   peak       of budget   time\n"
        "  1      38.4 GiB     51 %      1.9 s\n"
        "  2      42.9 GiB     57 %      2.2 s\n"
        "  8      69.7 GiB     93 %      5.8 s   <- chosen (9.2 fit, rounded down to a power of two)"
    )
