"""`batch_search.json`, when a search is reused, and what a search tells."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit.report.test_tables import example, profiled
from tests.unit.tune.test_token_budget import having
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy
from torchtune_adaptive.report.journal import Event
from torchtune_adaptive.tune import fit
from torchtune_adaptive.tune.fit import SEARCH_FILE, SearchFile
from torchtune_adaptive.tune.samples import PAIR

FINGERPRINT = {"model": "llama3_1.llama3_1_8b", "world_size": 8, "shape": (1, 2), "budget": 75.2}
KIND = dataclasses.replace(PAIR, padded=False)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(fit, "fingerprint_of", lambda *_: FINGERPRINT)


@pytest.mark.parametrize("result", [example(), profiled()], ids=["rows", "profile"])
def test_a_written_search_is_read_back_under_the_same_fingerprint(
    tmp_path: Path, result: SearchResult | Profile
) -> None:
    SearchFile(tmp_path / "new", FINGERPRINT).write(result, 4096)
    assert SearchFile(tmp_path / "new", FINGERPRINT).read(type(result)) == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == [SEARCH_FILE]


def test_a_search_of_another_fingerprint_or_none_is_no_answer(tmp_path: Path) -> None:
    assert SearchFile(tmp_path, FINGERPRINT).read(SearchResult) is None
    SearchFile(tmp_path, FINGERPRINT).write(profiled(), 4096)
    assert SearchFile(tmp_path, {**FINGERPRINT, "world_size": 4}).read(SearchResult) is None


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
def test_a_file_that_is_no_record_is_one_line_and_no_answer(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SEARCH_FILE).write_bytes(content)
    assert SearchFile(tmp_path, FINGERPRINT).read(SearchResult) is None
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path / SEARCH_FILE} is not a valid search record (")
    assert message.endswith("); searching again")


def test_a_record_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SEARCH_FILE).mkdir()
    SearchFile(tmp_path, FINGERPRINT).write(example(), 4096)
    assert caplog.messages == [
        f"cannot write {tmp_path / SEARCH_FILE} (Is a directory): the next run will search again"
    ]


def searched(folder: Path, measure: Any, stage: str = "policy", **adaptive: Any) -> Event:
    """The event of a search of 4096 tokens that finds what `measure` returns."""
    step, events = mock.Mock(length=4096), list[Event]()
    settings = dataclasses.replace(having(**adaptive), output_dir=str(folder))
    with mock.patch.object(fit, "find_max_batch_size", measure), mock.patch.object(fit, "profile_memory", measure):
        kind_of_search = fit.profile if adaptive.get("token_budget") else fit.rows
        kind_of_search(step, mock.Mock(), settings, KIND, most_rows=64, stage=stage, record=events.append)
    [event] = events
    return event


def test_the_journal_is_told_what_was_found_and_whether_by_an_earlier_run(tmp_path: Path) -> None:
    rows = searched(tmp_path, lambda *_, **__: example())
    assert rows.reason == "batch search · policy: 8 rows of 4096 tokens (9.2 fit, rounded down to a power of two)"
    assert (rows.after, rows.unit, rows.budget_bytes) == (8, "rows", example().budget_bytes)
    again = searched(tmp_path, measure=None)
    assert again == dataclasses.replace(rows, reason=f"{rows.reason}, reused from an earlier run")
    lengths = searched(tmp_path, lambda *_, **__: profiled(), stage="", token_budget="auto", reuse_search=False)
    assert lengths.reason.startswith("token budget: up to 51")
    assert (lengths.after, lengths.unit) == (profiled().limit_bytes, "bytes")


def test_a_row_that_does_not_fit_is_told_with_its_stage(tmp_path: Path) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise OneRowDoesNotFitError("one row of 256 tokens needs 2", Remedy.MORE_RANKS, need_bytes=2, budget_bytes=1)

    told = r"one row of 256 tokens needs 2 \(policy; in both answers together\); train on more ranks"
    with pytest.raises(OneRowDoesNotFitError, match=told) as error:
        searched(tmp_path, measure)
    assert (error.value.need_bytes, error.value.budget_bytes) == (2, 1)
