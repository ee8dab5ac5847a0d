"""Records of searches that earlier versions have written (`earlier/`): both were made by commit 9d0b256."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.record.search_file import read_search, write_search
from torchtune_adaptive.search.profile import Profile
from torchtune_adaptive.search.rows import SearchResult

EARLIER = Path(__file__).parent / "earlier"
KINDS = {"rows": SearchResult, "lengths": Profile}


def record_of(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((EARLIER / name / "batch_search.json").read_text(encoding="utf-8"))
    return record


def test_the_rows_that_were_found_before_are_read() -> None:
    result = read_search(EARLIER / "rows", record_of("rows")["fingerprint"], SearchResult)
    assert result is not None
    assert (result.rows, result.reason) == (4, "4.7 fit, rounded down to a power of two")
    assert [probe.rows for probe in result.probes] == [1, 2, 4]
    assert result.lines["update"].rows_within(result.budget_bytes) == float("inf")
    assert result.lines["loss"].bytes_at(4) == result.probes[-1].peak.phase_bytes["loss"]


def test_the_lengths_that_were_measured_before_are_read() -> None:
    result = read_search(EARLIER / "lengths", record_of("lengths")["fingerprint"], Profile)
    assert result is not None
    assert [(point.rows, point.length) for point in result.points][:3] == [(1, 256), (3, 256), (17, 64)]
    assert sum(point.held_out for point in result.points) == 2
    assert result.limit.fits(4, 256)
    assert not result.limit.fits(5, 256)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    record = record_of(name)
    result = read_search(EARLIER / name, record["fingerprint"], KINDS[name])
    assert result is not None
    write_search(tmp_path, result, record["sequence_length"], record["fingerprint"])
    written, before = (folder / "batch_search.json" for folder in (tmp_path, EARLIER / name))
    assert written.read_text(encoding="utf-8") == before.read_text(encoding="utf-8")
