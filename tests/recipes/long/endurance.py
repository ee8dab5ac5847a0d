"""A long run of tiny steps with many saves: its memory must not grow.

    python -m tests.recipes.long.endurance [--steps 5000]

Regularly read the memory of the process, the number of objects that Python's collector tracks, and the bytes alive on
the device (on a CPU, according to our meter). Compare the last third with the middle third; caches fill in the first.
"""

import argparse
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.ranks import run_on_ranks
from tests.recipes.crash.runs import EXTRA, Variant
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints.store import find_checkpoints

ROWS, EPOCHS, READINGS = 2, 2, 30
SAVE_EVERY, KEEP = 25, 2
MODEL = ("num_layers=1", "embed_dim=32", "intermediate_dim=32")
KIB = 2**10


class Reading(NamedTuple):
    process_bytes: int
    objects: int
    device_bytes: int


MOST_GROWTH = Reading(process_bytes=8 * KIB * KIB, objects=150, device_bytes=0)
"""Allowed growth from the middle third to the last. In 80 steps on a busy machine, a process has grown by 4.1 MiB."""
DEALT_BYTES = 4 * KIB
"""Samples read ahead under a budget stay on the device for varying times. In 5,000 steps: 3 bytes per step."""


CASES = (Variant("full", 1), Variant("lora", 1), Variant("full", 2, "tokens"))
"""Several ranks agree, and deal samples under a token budget."""


def growth(readings: Sequence[Reading]) -> Reading:
    """Return the growth of the minimum from the middle third to the last; temporary memory of a save does not count."""
    third = len(readings) // 3
    before, last = (map(min, zip(*part, strict=True)) for part in (readings[third : 2 * third], readings[-third:]))
    return Reading(*(end - begin for begin, end in zip(before, last, strict=True)))


def train(case: Variant, folder: Path, steps: int, each_step: Callable[[], object]) -> list[Reading]:
    """Collective: run; return the readings of each rank."""
    recipe = load_ours(case.kind)(config_of(case, folder, steps))
    every, readings, meters = max(1, steps // READINGS), list[Reading](), list[Any]()
    recipe.setup()
    watch, run = recipe.runner.measure_memory, recipe.runner.run

    def watch_too(memory: Any) -> None:
        meters.append(memory)
        watch(memory)

    def run_and_read(samples: Any, *, step: int, **options: Any) -> Any:
        each_step()
        result = run(samples, step=step, **options)
        if step % every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            process_bytes = pages * resource.getpagesize()
            readings.append(Reading(process_bytes, len(gc.get_objects()), meters[-1].live_bytes))
        return result

    recipe.runner.measure_memory, recipe.runner.run = watch_too, run_and_read
    recipe.train()
    recipe.cleanup()
    return readings


def config_of(case: Variant, folder: Path, steps: int) -> Any:
    return demo_config(
        case.kind,
        folder,
        *(f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in MODEL),
        "dataset._component_=tests.recipes.long.memory_pressure.numbered",
        *("dataset.seed=0", f"dataset.samples={steps // EPOCHS * ROWS * case.ranks}", "tokenizer.max_seq_len=256"),
        *(f"batch_size={ROWS}", "gradient_accumulation_steps=1", f"epochs={EPOCHS}", "shuffle=True"),
        *(f"save_every_n_steps={SAVE_EVERY}", f"keep_last_n_checkpoints={KEEP}"),
        "adaptive.memory_limit=64MiB",
        *EXTRA[case.limit],
    )


def endure(case: Variant, folder: Path, steps: int, each_step: Callable[[], object] = bool) -> str:
    """Run the case; raise if memory grows. Call `each_step` before every step."""
    began = time.monotonic()
    by_rank = run_on_ranks(
        case.ranks, train, case, folder / "run", steps, each_step, timeout_s=60 + steps // 10, in_group=False
    )
    grown = Reading(*map(max, zip(*map(growth, by_rank), strict=True)))
    message = (
        f"{case}: {steps} steps, {steps // SAVE_EVERY} saves; in the last third a process has grown by "
        f"{grown.process_bytes // KIB} KiB, by {grown.objects} objects, and by {grown.device_bytes} bytes on the device"
    )
    assert len([each for each in find_checkpoints(folder / "run" / "out") if each.manifest]) == KEEP
    most = MOST_GROWTH._replace(device_bytes=DEALT_BYTES) if case.limit == "tokens" else MOST_GROWTH
    assert all(measured <= limit for measured, limit in zip(grown, most, strict=True)), message
    return f"{message} ({time.monotonic() - began:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(endure(case, Path(folder), options.steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
