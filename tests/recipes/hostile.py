"""Starts a recipe or the plan as a command line does, in a process that may take only so much memory and time."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import adaptive_plan

from tests.ranks import started
from tests.recipes.running import load_ours
from torchtune_adaptive.forecast.keys import PlanSettings
from torchtune_adaptive.life import launch

MOST_BYTES = 2 * 2**30
"""Beyond what the process has mapped when it starts."""


@dataclass(frozen=True)
class Ended:
    status: int | None
    """None where it was still running when its time was over."""
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error")]


def start(program: str, arguments: Sequence[str], folder: Path, timeout_s: float = 60) -> Ended:
    """`program` is `full` or `lora`, which is set up but does not train, or `plan`."""
    path = folder / "output.txt"
    process = started(_main, program, arguments, folder, path, timeout_s)
    try:
        process.join(timeout_s + 10)
        return Ended(process.exitcode, path.read_text(errors="replace"))
    finally:
        process.kill()
        process.join()


def _main(program: str, arguments: Sequence[str], folder: Path, path: Path, timeout_s: float) -> None:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with path.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MOST_BYTES,) * 2)
    sys.argv = [program, *arguments]
    if program == "plan":
        launch.run_without_training(adaptive_plan.main, keys=[field.name for field in fields(PlanSettings)])
    else:
        launch.main(type("OnlySetUp", (load_ours(program),), {"train": lambda self: None}))
