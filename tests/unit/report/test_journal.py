"""The journal of a run: writing never fails, and reading gives one consistent history across crashes and resumes."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timeline import read_timeline
from torchtune_adaptive.engine.governor import RECOVERY, Change
from torchtune_adaptive.report.journal import EVENTS_FILE, STEPS_FILE, Journal

FILES = (EVENTS_FILE, STEPS_FILE)


def recovery(step: int, **others: Any) -> Change:
    return Change(kind=RECOVERY, step=step, reason="out of memory", unit="rows", before=8, after=4, **others)


def write_a_run(directory: Path, steps: int = 3) -> None:
    journal = Journal(directory)
    journal.start(0)
    for step in range(1, steps + 1):
        journal.step(step, {"loss": 1.0})
        journal.event(recovery(step))


def steps_in(directory: Path) -> list[int]:
    return [record["step"] for record in read_timeline(directory).steps]


def a_file_instead(directory: Path) -> None:
    directory.write_text("")


def folders_instead(directory: Path) -> None:
    for name in FILES:
        (directory / name).mkdir(parents=True)


def a_full_disk(directory: Path) -> None:
    directory.mkdir()
    for name in FILES:
        (directory / name).symlink_to("/dev/full")


CAUSES = {a_file_instead: "File exists", folders_instead: "Is a directory", a_full_disk: "No space left on device"}


@pytest.mark.parametrize("spoil", CAUSES, ids=lambda spoil: spoil.__name__)
def test_unwritable_journal_gives_one_line_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path / "out")
    write_a_run(tmp_path / "out")
    (line,) = caplog.messages
    assert line.startswith(f"the record of this run is incomplete: {tmp_path / 'out'}")
    assert line.endswith(f": {CAUSES[spoil]}; training continues")


def test_removed_folder_is_reported_once_and_not_recreated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "out")
    (tmp_path / "out").rmdir()
    for step in range(1, 4):
        journal.step(step, {})
    (line,) = caplog.messages
    assert "No such file or directory" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("figure", [object(), {object(): 1}, b"bytes"], ids=["object", "key", "bytes"])
def test_unwritable_figure_loses_only_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, figure: Any) -> None:
    journal = Journal(tmp_path)
    journal.step(1, {"loss": 1.0})
    journal.step(2, {"loss": figure})
    journal.step(3, {"loss": float("nan")})
    assert steps_in(tmp_path) == [1, 3]
    assert "NaN" not in (tmp_path / STEPS_FILE).read_text(), "it is not JSON"
    assert len(caplog.messages) == 1


@contextmanager
def files_no_larger_than(count: int) -> Iterator[None]:
    """Simulate a full disk for every file of this size. Python ignores the accompanying signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [150, 171, 199, 227])
def test_record_continues_after_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int) -> None:
    journal = Journal(tmp_path)
    journal.start(0)
    with files_no_larger_than(room):
        for step in range(1, 11):
            journal.step(step, {"loss": 1.0})
    assert [line.partition(":")[0] for line in caplog.messages] == ["the record of this run is incomplete"]
    for step in (11, 12):
        journal.step(step, {"loss": 1.0})
    assert (tmp_path / STEPS_FILE).stat().st_size > room
    steps = steps_in(tmp_path)
    assert steps[-2:] == [11, 12]
    assert steps[:-2] == list(range(1, len(steps) - 1))
    assert 2 <= len(steps[:-2]) < 10


sessions = st.lists(
    st.tuples(
        st.floats(0, 1),  # the checkpoint to resume from
        st.lists(st.booleans(), max_size=6),  # its steps, and which of them run out of memory
        st.floats(0, 1),  # the write at which it is killed
        st.floats(0, 1),  # and the byte of that write
    ),
    min_size=1,
    max_size=6,
)


class Story:
    """The expected history of a run, to compare with its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.steps: dict[int, int] = {}
        """The session that trained each step."""
        self.recoveries: list[tuple[int, int]] = []
        self.sessions = 0

    def session(self, resume_at: float, steps: list[bool], killed_at: float, byte: float, *, last: bool) -> None:
        """Train these steps after an earlier step; only the last session ends by itself."""
        done = round(resume_at * len(self.steps))
        self.steps = {step: by for step, by in self.steps.items() if step <= done}
        self.recoveries = [(step, by) for step, by in self.recoveries if step <= done]
        self.sessions += 1
        before = self._contents()
        journal, sizes = Journal(self.directory), [self._sizes()]
        journal.start(done)
        sizes.append(self._sizes())
        writes = [("start", done)]
        for step, recovers in enumerate(steps, done + 1):
            if recovers:
                journal.event(recovery(step, peak_bytes=self.sessions))
                sizes.append(self._sizes())
                writes.append((RECOVERY, step))
            journal.step(step, {"session": self.sessions, "loss": 0.5})
            sizes.append(self._sizes())
            writes.append(("step", step))
        assert all(now.startswith(then) for now, then in zip(self._contents(), before, strict=True)), "only appended to"
        complete = len(writes) if last else int(killed_at * len(writes))
        if complete < len(writes):
            complete += self._cut_off(sizes[complete], sizes[complete + 1], byte)
        self.steps |= {step: self.sessions for kind, step in writes[:complete] if kind == "step"}
        self.recoveries += [(step, self.sessions) for kind, step in writes[:complete] if kind == RECOVERY]

    def _contents(self) -> list[bytes]:
        return [path.read_bytes() if (path := self.directory / name).exists() else b"" for name in FILES]

    def _sizes(self) -> list[int]:
        return [*map(len, self._contents())]

    def _cut_off(self, before: list[int], after: list[int], byte: float) -> bool:
        """Cut a write off at this byte, with all that follows; return True if only its line end is missing."""
        left = kept = round(byte * (sum(after) - sum(before)))
        for name, start, end in zip(FILES, before, after, strict=True):
            written = min(left, end - start)
            left -= written
            if (self.directory / name).exists():
                os.truncate(self.directory / name, start + written)
        return kept >= sum(after) - sum(before) - 1


@given(sessions)
def test_run_killed_at_any_byte_and_resumed_has_each_step_once(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[float, list[bool], float, float]]
) -> None:
    story = Story(tmp_path_factory.mktemp("run"))
    for number, (resume_at, steps, killed_at, byte) in enumerate(sessions, 1):
        story.session(resume_at, steps, killed_at, byte, last=number == len(sessions))
    timeline = read_timeline(story.directory)
    assert [record["step"] for record in timeline.steps] == list(range(1, len(story.steps) + 1))
    assert {record["step"]: record["session"] for record in timeline.steps} == story.steps
    recoveries = [(event["step"], event["peak_bytes"]) for event in timeline.events if event["kind"] == RECOVERY]
    assert recoveries == story.recoveries


def test_event_is_one_line_with_every_known_field(tmp_path: Path) -> None:
    change = recovery(412, ranks=(3,), peak_bytes=900, budget_bytes=1000)
    Journal(tmp_path).event(change)
    written = json.loads((tmp_path / EVENTS_FILE).read_text(encoding="utf-8"))
    known = {name: value for name, value in asdict(change).items() if value is not None}
    assert written.pop("time") > 1.7e9
    assert written == {**known, "ranks": [3]}
