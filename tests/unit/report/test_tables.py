"""Tables of searches and profiles."""

from tests.simulated_memory import always_fits
from torchtune_adaptive.engine.length_profile import Profile, SampleLengths, measure_profile
from torchtune_adaptive.engine.search import Budget, Peak, SearchResult, search
from torchtune_adaptive.report.tables import profile_table, search_table

GIB = 2**30


def measured(rows: int) -> Peak:
    peaks = {1: 38.4, 2: 42.9, 8: 69.7}
    seconds = {1: 1.9, 2: 2.2, 8: 5.8}
    return Peak({"backward": int(peaks[rows] * GIB)}, fits=True, seconds=seconds[rows])


def example() -> SearchResult:
    return search(measured, Budget(int(75.2 * GIB)), no_fit_error=always_fits)


def failing() -> SearchResult:
    """Return a search with every kind of rejected probe."""

    def measure(rows: int) -> Peak:
        if rows == 16:
            return Peak({}, fits=False, seconds=12.34)
        return Peak({"step": rows * GIB, "update": GIB // 2}, fits=True, retries=2 * (rows == 8), seconds=0.5)

    return search(measure, Budget(int(11.5 * GIB)), no_fit_error=always_fits, strategy="decrease", max_rows=16)


def test_table_is_the_documented_one() -> None:
    assert search_table(example(), 4096) == (
        "batch search · linear · 4096 tokens · budget 75.2 GiB a rank\n"
        "  rows   peak       of budget   time\n"
        "  1      38.4 GiB     51 %      1.9 s\n"
        "  2      42.9 GiB     57 %      2.2 s\n"
        "  8      69.7 GiB     93 %      5.8 s   <- chosen (9.2 fit, rounded down to a power of two)"
    )


def test_table_shows_the_reason_for_each_rejected_size() -> None:
    lines = search_table(failing(), 128).splitlines()
    assert lines[2:] == [
        "  16     out of memory               12.3 s",
        "  8      8.0 GiB           70 %      0.5 s    2 allocator retries",
        "  4      4.0 GiB           35 %      0.5 s    <- chosen (8 did not fit)",
        "  out of memory in 1 probe, recovered",
    ]


def test_probe_over_a_soft_budget_is_distinguished_from_oom() -> None:
    def measure(rows: int) -> Peak:
        return Peak({"step": rows * GIB}, fits=True)

    result = search(measure, Budget(3 * GIB), no_fit_error=always_fits, strategy="binary")
    assert search_table(result, 128).endswith("  4      4.0 GiB    133 %      0.0 s   over budget")


def profiled() -> Profile:
    def measure(rows: int, length: int) -> Peak:
        return Peak({"layers": GIB + rows * length * 2**20, "update": 3 * GIB // 2}, fits=True, seconds=0.5)

    return measure_profile(measure, Budget(6 * GIB, GIB), SampleLengths(1024), no_fit_error=always_fits, most_rows=512)


def test_table_of_a_profile_has_rows_lengths_and_the_error() -> None:
    lines = profile_table(profiled()).splitlines()
    assert lines[0] == "token budget · 7 probes · budget 6.0 GiB a rank"
    assert lines[2] == "  1      1024     1024     2.0 GiB     33 %      0.5 s"
    assert sum(line.endswith("held out") for line in lines) == 2
    assert lines[-1].startswith("  fitted over rows and length; held-out probes are at most 0.0 % off; up to")
    assert lines[-1].endswith(
        (" up to 5119 tokens fit at any length", " up to 5120 tokens fit at any length")
    )  # 5 GiB, at one MiB per token; rounding error 1e-16
