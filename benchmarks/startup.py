"""Compare the CPU time from `tune run` to the end of the first step with stock, in one process and in turns.

Most of it is spent importing torch and torchtune, which both need. On a busy machine, single pairs vary by a tenth.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.results import Result, compared
from tests.recipes.running import OURS, STOCK_CLASSES, demo_config, environment

ROOT = Path(__file__).parent.parent
RECIPES = {"stock": STOCK_CLASSES["full"][0], "ours": OURS["full"][0]}


def run(pairs: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        times = {name: first_step_s(name, Path(folder)) for name in RECIPES}  # warms up: bytecode, files in the cache
        measured = []
        for number in range(pairs):
            for name in sorted(RECIPES, reverse=bool(number % 2)):
                times[name] = first_step_s(name, Path(folder))
            measured.append((times["stock"], times["ours"]))
    row = {
        "recipe": "full",
        "stock cpu s": statistics.median(stock for stock, _ in measured),
        "ours cpu s": statistics.median(ours for _, ours in measured),
        **compared(measured),
    }
    return Result([row], "CPU seconds of one process from its start to the end of the first step of the demo's config")


def first_step_s(name: str, folder: Path) -> float:
    """Return the CPU seconds that a new process needs until its first step is logged."""
    written = folder / "seconds"
    logger = ("metric_logger._component_=benchmarks.clock.FirstStep", f"metric_logger.path={written}")
    cfg = demo_config("full", folder / name, *logger)
    cfg.output_dir = str(folder / name)
    OmegaConf.save(cfg, folder / "config.yaml")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    written.unlink(missing_ok=True)
    ended = subprocess.run(
        [Path(sys.executable).with_name("tune"), "run", RECIPES[name], "--config", folder / "config.yaml"],
        env={**environment(), **group, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if not written.exists():
        raise RuntimeError(f"{name} did not train: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return float(written.read_text())
