"""Start a run with forked ranks or `tune run`, and wait until it ends or is killed."""

import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from tests.ranks import PATIENCE, RankFailed, RanksHung, patience, run_on_ranks
from tests.recipes.crash import kill_hook
from tests.recipes.crash.kill_points import ORDER, TIME, Order, Point, write_order
from tests.recipes.crash.variants import Variant
from tests.recipes.running import COMMAND_MARK, end_marked, environment, load_ours
from torchtune_adaptive.cli.status import Condition, condition_of

ROOT = Path(__file__).parents[3]
IN_PROCESS_S, TUNE_RUN_S = 90, 200
KILLED, FINISHED, FAILED, HUNG = "killed", "finished", "failed", "hung"
STOPPED = "stopped"
"""Received a signal before it was finished, and ended."""
EVERYTHING, LAUNCHER_FIRST, RANK_FIRST = "everything", "launcher first", "rank first"
"""Which processes of a `tune run` are killed: all at once; the launcher, and its ranks a moment later; or one rank,
leaving its peers to the launcher.
"""


@dataclass(frozen=True)
class Life:
    ended: str
    """KILLED, STOPPED, FINISHED, FAILED or HUNG."""
    where: str = ""
    """The operation at which the run was killed."""
    output: str = ""
    seconds: float = 0.0
    cleanly: bool = False
    """Exited by itself with status 0."""


@dataclass(frozen=True)
class Start:
    """How to start a run."""

    variant: Variant
    folder: Path
    arguments: tuple[str, ...]
    tune_run: bool = False
    """With the launcher if there are several ranks, else in tune's process."""
    manner: str = EVERYTHING
    launched: bool = False
    """With the launcher even for one rank."""


def live(start: Start, number: int, point: Point | None, after_step: int, *, file_bytes: int | None = None) -> Life:
    """Run the same command again and kill it at this point; limit the size of files to `file_bytes`."""
    notes = start.folder / "lives" / f"{number:04}"
    order = Order(point, str(start.folder / "out"), str(notes), after_step)
    began = time.monotonic()
    notes.mkdir(parents=True)
    life = _by_tune_run(start, order) if start.tune_run else _in_process(start, order, file_bytes)
    if point is not None and point.asks and life.where:
        life = _asked(life, start.folder / "out")
    return replace(life, seconds=time.monotonic() - began)


def _asked(life: Life, out: Path) -> Life:
    """Return how a run ended that received a signal: it prints this itself, the status does not show it."""
    if life.ended == HUNG:
        return life
    condition, (reason, *_) = condition_of(out)
    nothing_begun = reason.startswith(str(out))
    if nothing_begun or condition is Condition.CAN_CONTINUE:
        return replace(life, ended=STOPPED)
    if condition is Condition.FINISHED:
        return replace(life, ended=FINISHED)
    return replace(life, ended=FAILED, output=f"{reason}\n{life.output}")


def _in_process(start: Start, order: Order, file_bytes: int | None) -> Life:
    ended, why = FINISHED, ""
    try:
        run_on_ranks(start.variant.ranks, _rank, start, order, file_bytes, timeout_s=IN_PROCESS_S, in_group=False)
    except RankFailed as error:
        ended, why = FAILED, str(error)
    except RanksHung as error:
        ended, why = HUNG, str(error)
    where, output = struck_at(order.notes_folder), why + _output(order.notes_folder)
    if ended == FAILED and where:
        ended = KILLED
    return Life(ended, where, output, cleanly=ended == FINISHED)


def _rank(start: Start, order: Order, file_bytes: int | None) -> None:
    """Collective: run what `tune run` starts on each rank, with output to a file."""
    from torchtune_adaptive.lifecycle.entry_point import run_recipe

    rank = int(os.environ["RANK"])
    log = os.open(order.notes_folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    recipe = load_ours(start.variant.kind)
    kill_hook.install(order, rank)
    with mock.patch.object(sys, "argv", [start.variant.recipe, *start.arguments]):
        try:
            run_recipe(recipe, keys=start.variant.keys)
        except SystemExit as status:
            if status.code:
                raise RuntimeError(f"ended with status {status.code}") from None


def struck_at(notes: Path) -> str:
    """Return where the hook or the harness struck; empty if the run ended before."""
    for path in sorted(notes.glob("operations*")):
        for line in path.read_text().splitlines():
            if line.startswith("HIT "):
                return line.removeprefix("HIT ")
    return ""


def _output(notes: Path) -> str:
    return "".join(f"\n[{path.name}] {path.read_text(errors='replace')[-12_000:]}" for path in notes.glob("output*"))


def _by_tune_run(start: Start, order: Order) -> Life:
    mark, notes = uuid.uuid4().hex, order.notes_folder
    at_time = order.point if order.point and order.point.stage == TIME else None
    given = replace(order, point=None) if at_time else order
    with (notes / "output").open("w") as output:
        process = subprocess.Popen(
            tune_command(start), cwd=start.folder, env=tune_environment(given, mark), stdout=output, stderr=output
        )
        try:
            if at_time:
                _strike_by_hand(process, at_time, start.manner, mark, notes)
            process.wait(timeout=TUNE_RUN_S * patience() / PATIENCE)
        except subprocess.TimeoutExpired:
            return Life(HUNG, struck_at(notes), _output(notes))
        finally:
            left = end_marked(COMMAND_MARK, mark)
            process.wait(timeout=10)
    where = struck_at(notes)
    if left:
        return Life(HUNG, where, f"left running: {left}{_output(notes)}")
    if process.returncode == 0:
        return Life(FINISHED, where, _output(notes), cleanly=True)
    return Life(KILLED if where else FAILED, where, _output(notes))


def tune_command(start: Start) -> list[str]:
    launched = start.variant.ranks > 1 or start.launched
    ranks = ["--nproc_per_node", str(start.variant.ranks)] if launched else []
    tune = str(Path(sys.executable).parent / "tune")
    return [tune, "run", *ranks, start.variant.recipe, *start.arguments]


def tune_environment(order: Order, mark: str) -> dict[str, str]:
    path = f"{ROOT / 'tests' / 'recipes' / 'crash' / 'startup'}{os.pathsep}{ROOT}"
    return {**environment(), COMMAND_MARK: mark, ORDER: write_order(order), "PYTHONPATH": path}


def _strike_by_hand(process: subprocess.Popen[bytes], point: Point, manner: str, mark: str, notes: Path) -> None:
    """Send the signal at the given time, if the run still exists."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=point.at / 1000)
        return
    (notes / "operations").write_text(f"HIT after {point.at} ms, {manner}\n")
    if point.asks:
        process.send_signal(signal.Signals[f"SIG{point.blow}"])
        return
    if manner == LAUNCHER_FIRST:
        process.kill()
        time.sleep(0.2)  # let the ranks run without a parent
    elif manner == RANK_FIRST:
        ranks = [path for path in notes.glob("pid*") if path.name == f"pid{point.rank}"]
        for path in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        if ranks:
            return  # the launcher ends the other ranks
    end_marked(COMMAND_MARK, mark)
