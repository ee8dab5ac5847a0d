"""`batch_search.json`: when a search is reused, and when it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.test_tables import example, profiled
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.tune.search_record import (
    SEARCH_FILE,
    profile_event,
    read_search,
    search_event,
    write_search,
)

FINGERPRINT = {"model": "llama3_1.llama3_1_8b", "world_size": 8, "shape": (1, 2), "budget": 75.2}


@pytest.mark.parametrize("result", [example(), profiled()], ids=["rows", "profile"])
def test_a_written_search_is_read_back_under_the_same_fingerprint(
    tmp_path: Path, result: SearchResult | Profile
) -> None:
    write_search(tmp_path / "new", result, 4096, FINGERPRINT)
    assert read_search(tmp_path / "new", FINGERPRINT, type(result)) == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == [SEARCH_FILE]


def test_a_search_of_another_fingerprint_or_none_is_no_answer(tmp_path: Path) -> None:
    assert read_search(tmp_path, FINGERPRINT, SearchResult) is None
    write_search(tmp_path, profiled(), 4096, FINGERPRINT)
    assert read_search(tmp_path, {**FINGERPRINT, "world_size": 4}, SearchResult) is None


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in {"fingerprint": FINGERPRINT, "result": {}}.items() if name != key}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"\xff", b"[" * 100_000),
        *(json.dumps(without(key)).encode() for key in ("fingerprint", "result", "")),
        json.dumps({"fingerprint": FINGERPRINT, "result": {"probes": [3], "lines": []}}).encode(),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_record_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SEARCH_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / SEARCH_FILE} is not a valid search record \\(.+\\)$"):
        read_search(tmp_path, FINGERPRINT, SearchResult)


def test_a_record_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SEARCH_FILE).mkdir()
    write_search(tmp_path, example(), 4096, FINGERPRINT)
    assert caplog.messages == [
        f"cannot write {tmp_path / SEARCH_FILE} (Is a directory): the next run will search again"
    ]


def test_the_journal_is_told_what_was_found() -> None:
    rows, lengths = search_event(example(), 4096, "policy"), profile_event(profiled())
    assert rows.reason == "batch search · policy: 8 rows of 4096 tokens (9.2 fit, rounded down to a power of two)"
    assert (rows.after, rows.unit, rows.budget_bytes) == (8, "rows", example().budget_bytes)
    assert lengths.reason.startswith("token budget: up to 51")
    assert (lengths.after, lengths.unit) == (profiled().limit_bytes, "bytes")
