"""Small files are written atomically, and failures never end a run."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtune_adaptive import atomic_files
from torchtune_adaptive.atomic_files import read_json, replace_file

WRITING_FOREVER = """
import runpy, sys
from pathlib import Path
replace_file = runpy.run_path(sys.argv[1])["replace_file"]
while True:
    for letter in (b"a", b"b"):
        replace_file(Path(sys.argv[2]), letter * 2_000_000)
"""


def test_killed_concurrent_writers_leave_the_old_or_the_new_content(tmp_path: Path) -> None:
    path, draw = tmp_path / "folder" / "file", random.Random(0)
    command = [sys.executable, "-c", WRITING_FOREVER, atomic_files.__file__, str(path)]
    for seconds in (1.5, *(draw.uniform(0.05, 0.15) for _ in range(12))):
        writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
        try:
            deadline = time.monotonic() + 240
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(seconds)
            assert [writer.poll() for writer in writers] == [None, None], "one has taken the other's draft away"
        finally:
            for writer in writers:
                writer.kill()
                writer.communicate()
        assert path.read_bytes() in (b"a" * 2_000_000, b"b" * 2_000_000)
    for draft in path.parent.glob(atomic_files.DRAFTS):
        draft.unlink()
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    replace_file(tmp_path / "file", b"old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[1]", b"\xff", b"\0" * 9, b"[" * 100_000],
    ids=["empty", "torn", "null", "list", "invalid UTF-8", "zeros", "deep"],
)
def test_invalid_json_object_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    assert read_json(tmp_path / "file") is None
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "file")
    with pytest.raises(ValueError, match="Is a directory"):
        read_json(tmp_path)
