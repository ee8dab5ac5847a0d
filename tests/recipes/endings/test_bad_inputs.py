"""Any config gives a one-line error that names the key, or a run that is set up; no traceback, no hang."""

import faulthandler
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks import started
from tests.recipes.running import load_ours
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.lifecycle.entry_point import run_recipe

MOST_BYTES = 2 * 2**30
"""Allowed in addition to the memory mapped at the start."""


Ended = tuple[int | None, str]
"""The exit status, or None after a timeout; and the output."""


def start(program: str, arguments: Sequence[str], folder: Path, timeout_s: float = 60) -> Ended:
    """Set up the recipe `program`, `full` or `lora`, without training."""
    path = folder / "output.txt"
    process = started(_main, program, arguments, folder, path, timeout_s)
    try:
        process.join(timeout_s + 10)
        return process.exitcode, path.read_text(errors="replace")
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
    run_recipe(type("OnlySetUp", (load_ours(program),), {"train": lambda self: None}))


CONFIG = ("--config", "adaptive/demo/full")
SMALL = (*CONFIG, "dataset.samples=16", "output_dir=out", "use_maximum_batch_size=False")


def assert_one_line_error(ended: Ended, key: str) -> None:
    status, output = ended
    assert status == 1, output
    assert "Traceback" not in output
    [error] = [line for line in output.splitlines() if line.startswith("error")]
    assert key in error


SETTINGS_KEYS = [field.name for field in fields(Settings)]
ADAPTIVE_KEYS = [field.name for field in fields(AdaptiveConfig)]
KEYS = [
    *SETTINGS_KEYS,
    *ADAPTIVE_KEYS,
    *(f"adaptive.{name}" for name in ADAPTIVE_KEYS),
    *("adaptive", "batch_increase_function", "model", "optimizer", "dataset", "loss", "profiler", "lr_scheduler"),
    *("profiler.enabled", "checkpointer.output_dir", "checkpointer.checkpoint_dir", "optimizer.mine"),
]
NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 10**9, 10**30, -(10**30)]), st.floats(allow_infinity=True)
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text("ab.,:/$0 ", max_size=6), st.just("${nothing}"))
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from(["a", "_component_"]), SCALARS, max_size=2)
)


def as_yaml(value: Any) -> str:
    """Format a value as YAML; JSON is YAML except for three numbers."""
    text = json.dumps(value)
    for json_name, yaml_name in (("-Infinity", "-.inf"), ("Infinity", ".inf"), ("NaN", ".nan")):
        text = text.replace(json_name, yaml_name)
    return text


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_any_key_is_accepted_or_reported_with_its_key(key: str, value: Any) -> None:
    with TemporaryDirectory() as folder:
        ended = start("full", [*SMALL, f"{key}={as_yaml(value)}"], Path(folder), timeout_s=100)
    if ended[0] == 0:
        assert "Traceback" not in ended[1]
    else:
        assert_one_line_error(ended, key)
