"""Tables of searches and profiles."""

from tests.simulated_memory import always_fits
from torchtune_adaptive.engine.length_profile import SampleLengths, measure_profile
from torchtune_adaptive.engine.search import Budget, Peak, search
from torchtune_adaptive.report.tables import profile_table, search_table

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


def test_table_of_a_profile_has_rows_lengths_and_the_error() -> None:
    def measure(rows: int, length: int) -> Peak:
        return Peak({"layers": GIB + rows * length * 2**20, "update": 3 * GIB // 2}, fits=True, seconds=0.5)

    found = measure_profile(measure, Budget(6 * GIB, GIB), SampleLengths(1024), no_fit_error=always_fits, most_rows=512)
    lines = profile_table(found).splitlines()
    assert lines[0] == "token budget · 7 probes · budget 6.0 GiB a rank"
    assert lines[2] == "  1      1024     1024     2.0 GiB     33 %      0.5 s"
    assert sum(line.endswith("held out") for line in lines) == 2
    assert lines[-1].startswith("  fitted over rows and length; held-out probes are at most 0.0 % off; up to")
    assert lines[-1].endswith(
        (" up to 5119 tokens fit at any length", " up to 5120 tokens fit at any length")
    )  # 5 GiB, at one MiB per token; rounding error 1e-16
