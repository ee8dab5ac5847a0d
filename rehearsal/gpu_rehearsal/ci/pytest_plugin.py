"""A pytest plugin: the fixture `rehearse` checks what a training script needs on GPUs that are absent (docs/ci.md).

pytest loads it at every start, so it imports rehearsals only for a test that uses the fixture.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gpu_rehearsal import RehearsalResult
    from gpu_rehearsal.gpus import Gpu

PEAKS = "peaks.json"
"""The file of recorded peaks, in the folder of the test."""
NOT_RECORDED = "--update-peaks records nothing for a rehearsal without growth_percent: pass growth_percent to record it"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.addoption("--update-peaks", action="store_true", help=f"rehearsals: record their peaks in {PEAKS}")


@pytest.fixture
def rehearse(request: pytest.FixtureRequest) -> Callable[..., RehearsalResult]:
    """Return `rehearse(command, gpu="h100", ranks=8, reserved_below="70GiB", ...)`, which returns the result.

    It accepts the arguments of `gpu_rehearsal.rehearse` and of `Expectations`, and fails the test if an
    expectation is not met.
    """
    from gpu_rehearsal.ci.expectations import Expectations, peak_of, read_peaks, report, update_peaks
    from gpu_rehearsal.ci.github import annotate
    from gpu_rehearsal.interface import GPU, rehearse

    peaks, calls = request.path.with_name(PEAKS), 0

    def check(command: str | Sequence[str], gpu: str | Gpu = GPU, *args: Any, **options: Any) -> RehearsalResult:
        nonlocal calls
        calls += 1
        name = f"{request.path.name}::{request.node.nodeid.partition('::')[2]}" + f" ({calls})" * (calls > 1)
        expected = Expectations.of(options, command)
        given = {name: options[name] for name in options if name not in vars(expected)}
        found = rehearse(command, gpu, *args, **given)
        if found.interrupted:
            raise KeyboardInterrupt
        comparable = expected.fits and found.largest is None
        if request.config.getoption("update_peaks") and expected.growth_percent is None and comparable:
            request.node.warn(pytest.PytestWarning(NOT_RECORDED))
        elif request.config.getoption("update_peaks") and found.fits and comparable:
            update_peaks(peaks, {name: peak_of(found)})
        recorded = read_peaks(peaks).get(name)
        found = expected.find_growth(
            found, recorded, lambda **other: rehearse(command, gpu, *args, **{**given, **other})
        )
        if failures := expected.failures(found, recorded):
            about = f"{command if isinstance(command, str) else shlex.join(command)}, {getattr(gpu, 'name', gpu)}"
            annotate(name, failures, found, request.path, request.node.location[1] + 1)
            # pytest's summary shows the first line
            pytest.fail(f"{failures[0]}\n({about})\n\n{report(failures[1:], found, recorded)}", pytrace=False)
        return found

    return check
