"""Full and read-only disks: a clear error, and afterwards the run resumes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.recipes.crash import run_outputs
from tests.recipes.crash.child_runs import FAILED, FINISHED, KILLED, Start, live
from tests.recipes.crash.kill_points import TRAIN, Point
from tests.recipes.crash.summary import Tally
from tests.recipes.crash.variants import FULL, LORA, STEPS, Variant, write_config
from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.demo.weights import WEIGHTS_FILE, generate_if_missing

SMALL, LARGE = {FULL: "12m", LORA: "5m"}, "128m"
"""Space for two checkpoints, and for all."""
SMALL_FILES_BYTES = 2**20
"""Less than the weights need."""


def disk_cases(variant: Variant, folder: Path, reference: Path) -> Tally:
    """Run the disk cases; separate disks need the right to mount."""
    run = DiskRun(variant, folder, reference, tally := Tally())
    run.files_too_large()
    print(f"  {variant}: files too large", flush=True)
    if may_mount(folder):
        run.disk_full()
        run.killed_on_a_small_disk()
        run.read_only()
        print(f"  {variant}: disk full, read-only", flush=True)
    return tally


def may_mount(folder: Path) -> bool:
    probe = folder / "mounts"
    probe.mkdir(parents=True, exist_ok=True)
    try:
        with mounted(probe, LARGE):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    _call("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield
    finally:
        _call("umount", "--lazy", str(folder))


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


class DiskRun:
    """Runs of one variant with each kind of disk failure."""

    def __init__(self, variant: Variant, folder: Path, reference: Path, tally: Tally) -> None:
        self._variant, self._folder, self._reference, self._tally = variant, folder, reference, tally

    def files_too_large(self) -> None:
        start = self._start("files")
        self._fails(start, 0, ["could not be saved"], file_bytes=SMALL_FILES_BYTES)
        self._resumes(start, 1)

    def disk_full(self) -> None:
        start = self._start("full")
        with mounted(start.folder / "out", SMALL[self._variant]):
            self._fails(start, 0, ["could not be saved", "free", "step_4"])
            _call("mount", "-o", f"remount,size={LARGE}", str(start.folder / "out"))
            self._resumes(start, 1)

    def killed_on_a_small_disk(self) -> None:
        """With space for two checkpoints: leftovers of a kill must not use it up."""
        start = self._start("small", "keep_last_n_checkpoints=1")
        with mounted(start.folder / "out", SMALL[self._variant]):
            for number, point in enumerate((Point(TRAIN, 6), Point(TRAIN, 12), None)):
                life = live(start, number, point, 2)
        if life.ended != FINISHED:
            self._tally.lose(f"{self._variant} disk small: {life.ended}\n{life.output}")

    def read_only(self) -> None:
        """Make the disk read-only after the first checkpoint."""
        start = self._start("read-only")
        out = str(start.folder / "out")
        with mounted(start.folder / "out", LARGE):
            life = live(start, 0, Point(TRAIN, 1), 4)
            assert life.ended == KILLED, life.output
            _call("mount", "-o", "remount,ro", out)
            self._fails(start, 1, ["Read-only file system"])
            _call("mount", "-o", "remount,rw", out)
            self._resumes(start, 2)

    def _start(self, name: str, *overrides: str) -> Start:
        folder = self._folder / name
        arguments = write_config(self._variant, folder, *overrides)
        (folder / "out").mkdir(parents=True)
        # files other than checkpoints go elsewhere
        generate_if_missing(folder.parent / "weights" / WEIGHTS_FILE, lambda: demo_model().state_dict())
        return Start(self._variant, folder, tuple(arguments))

    def _fails(self, start: Start, number: int, words: list[str], file_bytes: int | None = None) -> None:
        """Check that the run fails with one message that names the folder, and keeps complete checkpoints."""
        before, out = run_outputs.complete_checkpoints(start.folder / "out"), start.folder / "out"
        life = live(start, number, None, STEPS, file_bytes=file_bytes)
        how = f"{self._variant} disk {start.folder.name}"
        message = life.output.rpartition("\nerror")[2]
        missing = [word for word in [str(out), *words] if word.lower() not in message.lower()]
        if life.ended != FAILED or missing or "Traceback" in message:
            self._tally.fault(f"{how}: {life.ended}, without {missing}\n{life.output}")
        gone = run_outputs.lost_to_pruning(before, run_outputs.complete_checkpoints(out))
        if gone:
            self._tally.fault(f"{how}: gone are {gone}")

    def _resumes(self, start: Start, number: int) -> None:
        """Check that the run finishes like the undisturbed one after the disk is repaired."""
        life = live(start, number, None, STEPS)
        how = f"{self._variant} disk {start.folder.name}, afterwards"
        if life.ended != FINISHED:
            self._tally.lose(f"{how}: {life.ended}\n{life.output}")
        else:
            for each in run_outputs.differences(start.folder, self._reference):
                self._tally.fault(f"{how}: {each}")
