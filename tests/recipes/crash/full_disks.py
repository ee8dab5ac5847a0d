"""Full and read-only disks: a clear error, and afterwards the run resumes."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.recipes.crash import outputs
from tests.recipes.crash.chain import Tally
from tests.recipes.crash.hook import TRAIN, Point
from tests.recipes.crash.plans import FULL, LORA
from tests.recipes.crash.runs import FAILED, FINISHED, KILLED, STEPS, Start, Variant, live, prepared

SMALL, LARGE = {FULL: "12m", LORA: "5m"}, "128m"
"""Space for two checkpoints, and for all."""
SMALL_FILES_BYTES = 2**20
"""Less than the weights need."""


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    _call("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield
    finally:
        _call("umount", "--lazy", str(folder))


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def may_mount(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with mounted(folder, LARGE):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def disk_cases(variant: Variant, folder: Path, reference: Path) -> Tally:
    """Run a variant with each kind of disk failure; separate disks need the right to mount."""
    tally = Tally()
    shutil.copytree(reference.parent / "weights", folder / "weights")  # no file but checkpoints fills the disk

    def begun(name: str, *overrides: str) -> Start:
        start = prepared(variant, folder / name, *overrides)
        start.out.mkdir()
        return start

    def fails(start: Start, number: int, *words: str, file_bytes: int | None = None) -> None:
        """Check that the run fails with one message that names the folder, and keeps complete checkpoints."""
        before = outputs.complete_checkpoints(start.out)
        life = live(start, number, None, STEPS, file_bytes=file_bytes)
        message = life.output.rpartition("\nerror")[2]
        missing = [word for word in (str(start.out), *words) if word.lower() not in message.lower()]
        if life.ended != FAILED or missing or "Traceback" in message:
            tally.fault(f"{start.folder}: {life.ended}, without {missing}\n{life.output}")
        if gone := outputs.lost_to_pruning(before, outputs.complete_checkpoints(start.out)):
            tally.fault(f"{start.folder}: gone are {gone}")

    def resumes(start: Start, number: int) -> None:
        """Check that the run finishes like the undisturbed one after the disk is repaired."""
        life = live(start, number, None, STEPS)
        found = [*outputs.differences(start.folder, reference)] if life.ended == FINISHED else [life.output]
        if found:
            tally.fault(f"{start.folder}, afterwards: {life.ended}, {found}")

    start = begun("files-too-large")
    fails(start, 0, "could not be saved", file_bytes=SMALL_FILES_BYTES)
    resumes(start, 1)
    if not may_mount(folder / "mounts"):
        print(f"  {variant}: no right to mount a full or read-only disk", flush=True)
        return tally
    start = begun("disk-full")
    with mounted(start.out, SMALL[variant]):
        fails(start, 0, "could not be saved", "free", "step_4")
        _call("mount", "-o", f"remount,size={LARGE}", str(start.out))
        resumes(start, 1)
    start = begun("read-only")
    with mounted(start.out, LARGE):
        life = live(start, 0, Point(TRAIN, 1), 4)
        assert life.ended == KILLED, life.output
        _call("mount", "-o", "remount,ro", str(start.out))
        fails(start, 1, "Read-only file system")
        _call("mount", "-o", "remount,rw", str(start.out))
        resumes(start, 2)
    start = begun("small-disk", "keep_last_n_checkpoints=1")
    with mounted(start.out, SMALL[variant]):  # leftovers of a kill must not use it up
        for number, point in enumerate((Point(TRAIN, 6), Point(TRAIN, 12), None)):
            life = live(start, number, point, 2)
    if life.ended != FINISHED:
        tally.fault(f"{start.folder}: {life.ended}\n{life.output}")
    return tally
