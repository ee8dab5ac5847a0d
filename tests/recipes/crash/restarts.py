"""Ranks killed under a launcher that restarts them, without a user's command."""

import subprocess
import uuid
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from tests.recipes.crash import run_outputs
from tests.recipes.crash.child_runs import Start, struck_at, tune_command, tune_environment
from tests.recipes.crash.kill_points import START, TRAIN, Order, Point
from tests.recipes.crash.summary import Tally
from tests.recipes.crash.variants import KEEP, SAVE_EVERY, Variant, write_config
from tests.recipes.running import COMMAND_MARK, end_marked

KILLS = (Point(TRAIN, 3, rank=1), Point(START, 3), Point(TRAIN, 5))
TIMEOUT_S = 300


def restarted(variant: Variant, folder: Path, reference: Path, kills: tuple[Point, ...] = KILLS) -> Tally:
    """Run `tune run --max-restarts` and kill one rank in each attempt except the last."""
    tally = Tally()
    start, notes = Start(variant, folder, tuple(write_config(variant, folder)), tune_run=True), folder / "notes"
    orders = [
        Order(point, str(folder / "out"), str(notes / str(restart)), KEEP * SAVE_EVERY if restart == 0 else 0, restart)
        for restart, point in enumerate(kills)
    ]
    status, output = _run(tune_command(start, "--max-restarts", str(len(kills))), orders, folder)
    _count(variant, orders, run_outputs.logged_steps(folder), tally)
    how = f'--only "{variant} restarts"'
    if status != 0:
        tally.lose(f"{how}: status {status}\n{output}")
        return tally
    tally.resumed = tally.killed
    found = run_outputs.differences(folder, reference)
    if found:
        tally.fault(f"{how}: {'; '.join(found)}")
    return tally


def _run(command: list[str], orders: list[Order], folder: Path) -> tuple[int | None, str]:
    mark, log = uuid.uuid4().hex, folder / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=tune_environment(orders, mark), stdout=output, stderr=output
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=TIMEOUT_S)
        finally:
            status = process.poll()
            end_marked(COMMAND_MARK, mark)
            process.wait(timeout=10)
    return status, log.read_text(errors="replace")[-6000:]


def _count(variant: Variant, orders: list[Order], steps: list[int], tally: Tally) -> None:
    for order in orders:
        where = struck_at(order.notes_folder)
        if where:
            tally.kill(where, tune_run=True)
    for before, after in pairwise(steps):
        if after <= before:
            tally.steps(str(variant), before - after + 1, before - variant.safe_after(before), f"{variant} restarts")
