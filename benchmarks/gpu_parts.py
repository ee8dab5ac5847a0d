"""Measurements of `benchmarks.gpu_day`, one part per process: python -m benchmarks.gpu_parts PART FILE [PIPE]

Each row that a part yields is written to FILE at once, so that a part that is stopped keeps its rows. On a null device
(`ON_NULL`) every part runs in full, but without kernels, so its times and losses are meaningless.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import overhead, packing, trainer
from benchmarks.clock import Moment
from benchmarks.gpu_day import ROOT, end_with_gpu_day
from benchmarks.results import compared
from tests.gpu import one_card, test_search
from tests.gpu.real_steps import (
    GIB,
    ON_NULL,
    build,
    demo,
    fresh_processes,
    limit,
    samples_of,
    use,
)
from tests.ranks import run_on_ranks
from torchtune_adaptive import find_max_batch_size
from torchtune_adaptive.engine.limit_policy import Change
from torchtune_adaptive.engine.memory import CudaMemory
from torchtune_adaptive.engine.oom import release_memory

REHEARSE = Path(sys.executable).with_name("rehearse")
TURNS = "TORCHTUNE_ADAPTIVE_TURNS"
"""Environment variable with the path of a file. A process locks it while it uses the card."""
CASE_S = 60 * (4 if ON_NULL else 1)
"""Time limit of a script that is compared with its rehearsal."""
Row = dict[str, Any]

SMALL = {"num_layers": 2, "embed_dim": 256, "intermediate_dim": 512, "vocab_size": 8192}
"""Model sizes on null devices: small, because the demo writes its weights to disk."""
MEDIUM = {"num_layers": 16, "num_heads": 16, "num_kv_heads": 8, "embed_dim": 1024, "intermediate_dim": 4096}
WIDE = {"num_layers": 4, "num_heads": 32, "num_kv_heads": 8, "embed_dim": 2048, "intermediate_dim": 8192}


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other process uses the card; processes start and import in parallel."""
    with open(os.environ[TURNS], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def in_turns(
    cases: Sequence[tuple[Any, ...]], *, in_group: bool = False, together: bool = True
) -> Iterator[tuple[int, Any]]:
    """Run every case, a function and its arguments, in its own process; yield position and result as they arrive.

    With `together=False`, a process starts after the previous one has ended, so that imports do not disturb timings.
    If cases fail, raise the first error after the results of the others.
    """

    def run(case: tuple[Any, ...]) -> Any:
        return run_on_ranks(1, *case, timeout_s=300, in_group=in_group)[0]

    workers = 1 if not together else len(cases) if (os.cpu_count() or 1) >= 8 else 2
    with (
        tempfile.NamedTemporaryFile() as file,
        mock.patch.dict(os.environ, {TURNS: file.name}),  # the processes inherit it
        ThreadPoolExecutor(workers) as pool,
    ):
        running = {pool.submit(run, case): position for position, case in enumerate(cases)}
        failed: list[BaseException] = []
        for done in as_completed(running):
            if error := done.exception():
                failed.append(error)
            else:
                yield running[done], done.result()
        if failed:
            raise failed[0]


def sized(sizes: dict[str, int]) -> tuple[str, ...]:
    sizes = SMALL if ON_NULL else {**sizes, "vocab_size": 32_768}
    return tuple(f"{where}.{name}={size}" for name, size in sizes.items() for where in ("model", "checkpointer.sizes"))


ON_CARD = ("device=cuda", "dtype=bf16", "log_peak_memory_stats=True", "optimizer.fused=True")


class Outcomes:
    """A pytest plugin that appends the outcome of every test to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Append the outcome of the test's call, or of a set-up that failed or was skipped."""
        if report.when == "call" or report.outcome != "passed":
            name, text = report.nodeid.rpartition("::")[2], str(report.longrepr or "")
            row = {"test": name, "outcome": report.outcome, "seconds": report.duration, "message": text[-300:]}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def tests(*files: str) -> Iterator[Row]:
    """Run tests; their outcomes are written as they come. Fail if one fails."""
    options = ["-v", "-p", "no:cacheprovider", *(["-m", "not real_gpu"] * ON_NULL)]
    status = pytest.main([*options, *files], [Outcomes(Path(sys.argv[2]))])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(int(status))
    yield from ()


def rehearsals() -> Iterator[Row]:
    """Run scripts on the card and rehearse them; yield memory and seconds of every step, side by side.

    Fail after all rows if a script did not run. Skip one whose packages are missing: PEFT rejects torchtune's torchao.
    """
    memory = f"{torch.cuda.get_device_properties(0).total_memory // 2**20}MiB"
    cases = [case for case in one_card.CASES if case != "qlora" or find_spec("bitsandbytes")]
    ran = set()
    with ThreadPoolExecutor(1 if ON_NULL else len(cases)) as pool:
        rehearsed = {case: pool.submit(rehearse, case, memory) for case in cases}
        for case in cases:
            real = outputs(sys.executable, "-m", "tests.gpu.one_card", case)
            for row in steps_of(case, real, *rehearsed[case].result()):
                ran |= {case} if row["step"] else set()
                yield row
    if failed := [case for case in cases if case not in ran]:
        raise SystemExit(f"did not run: {', '.join(failed)}")


def rehearse(case: str, memory: str) -> tuple[tuple[str, str], float | None]:
    """Return the output of the rehearsed script, and the estimated seconds of a step."""
    gpu = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    options = ["--gpu", gpu, "--memory", memory, "--format", "json"]
    script = ["-m", "tests.gpu.one_card", case]
    result, output = outputs(str(REHEARSE), *options, "--", *script)
    time = json.loads(result)["time"] if result.startswith("{") else None
    return (output, output), time and time["seconds"]


def outputs(*command: str) -> tuple[str, str]:
    """Return what a command printed; its standard error is shown, too."""
    rehearsal = str(REHEARSE) in command  # a rehearsal loads a null device of its own
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" or not rehearsal}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_S, check=False, env=variables
        )
    except subprocess.TimeoutExpired as stopped:  # its output is bytes, in spite of text=True
        printed_so_far = (stopped.stdout or b"").decode(errors="replace")
        return printed_so_far.rpartition("\n")[0], f"stopped after {CASE_S} s"
    if ended.returncode:
        print(f"{' '.join(command)} ended with status {ended.returncode}:\n{ended.stdout[-1500:]}")
        print(ended.stderr[-3000:])
    return ended.stdout, ended.stderr


def steps_of(case: str, real: tuple[str, str], rehearsed: tuple[str, str], estimated: float | None) -> list[Row]:
    peaks, found = printed("peak", real[0]), printed("peak", rehearsed[0])
    seconds = printed("seconds", real[0])
    if not peaks:
        return [{"case": case, "step": None, "result": "did not run: " + (real[1].strip().splitlines() or ["?"])[-1]}]
    rows = []
    for step, (allocated, reserved) in enumerate(peaks):
        expected = found[step] if step < len(found) else (None, None)
        rows.append(
            {
                "case": case,
                "step": step + 1,
                "result": "same" if list(expected) == [allocated, reserved] else "different",
                "allocated": allocated,
                "rehearsed": expected[0],
                "reserved": reserved,
                "rehearsed reserved": expected[1],
                "seconds": seconds[step] if step < len(seconds) else None,
                "estimated": estimated,
            }
        )
    return rows


def printed(name: str, output: str) -> list[Any]:
    return [json.loads(line.removeprefix(name)) for line in output.splitlines() if line.startswith(f"{name} ")]


def step_overhead() -> Iterator[Row]:
    """Compare the duration of steps with stock torchtune and transformers' Trainer: same batch, no errors."""
    pairs = 2 if ON_NULL else 3
    recipes = [overhead.Case("full", 1, overhead.WHOLE, overhead.WHOLE), overhead.Case("lora", 1, "sharded", "sharded")]
    models = {"small": ("embed_dim", 256), "medium": ("embed_dim", 1024)}
    cases: list[tuple[Any, ...]] = [
        (pairs_of_a_recipe, case, size, pairs) for case in recipes for size in (SMALL, MEDIUM)
    ]
    names = [f"{case.recipe}, {name} model" for case in recipes for name in models]
    if not ON_NULL:  # a null device computes no losses, which AdaptiveTrainer compares
        cases.append((pairs_of_trainer, pairs))
        names.append("Trainer")
    for position, times in in_turns(cases, together=False):
        yield duration(names[position], times)


def duration(name: str, times: list[tuple[Moment, Moment]]) -> Row:
    wall = compared([(stock.wall_s, ours.wall_s) for stock, ours in times])
    cpu = compared([(stock.cpu_s, ours.cpu_s) for stock, ours in times])
    return {
        "step": name,
        "stock ms": 1e3 * statistics.median(stock.wall_s for stock, _ in times),
        "ours ms": 1e3 * statistics.median(ours.wall_s for _, ours in times),
        **wall,
        "CPU ratio": cpu["ratio"],
    }


def pairs_of_a_recipe(case: overhead.Case, sizes: dict[str, int], pairs: int) -> list[tuple[Moment, Moment]]:
    use("cuda")
    tokens = 256 if sizes is SMALL or sizes == SMALL else 1024
    changes = (*sized(sizes), *ON_CARD, "batch_size=4", f"tokenizer.max_seq_len={tokens}", "dataset.samples=96")
    merged = mock.patch.object(overhead, "MODEL", (*overhead.MODEL, *changes))
    with tempfile.TemporaryDirectory() as folder, merged, turn():
        return overhead.time_both(case, Path(folder), pairs, device="cuda")


def pairs_of_trainer(pairs: int) -> list[tuple[Moment, Moment]]:
    use("cuda")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # one process, without a process group
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder, turn():
        return trainer.time_both("one process", 2, Path(folder), pairs, use_cpu=False, bf16=True)


WAYS = {"rows": packing.ROWS, "budget": packing.TOKENS, "padded budget": packing.PADDED, "packs": packing.PACKS}
LIMIT = "20GiB"


def token_budgets() -> Iterator[Row]:
    """Train the same samples by rows, by token budgets, and by torchtune's packs, with the same memory limit."""
    cases = [(train_epochs, lengths.name, way) for lengths in packing.ON_GPU for way in WAYS]
    return (row for _, row in in_turns(cases))


def train_epochs(lengths: str, way: str) -> Row:
    """Train a first epoch that warms up, then two; return their median speed."""
    use("cuda")
    drawn = packing.DISTRIBUTIONS[lengths]
    epochs, steps = 3, 2
    samples, batch_size = drawn.samples_per_step * steps, drawn.samples_per_step
    if way == "packs":
        batch_size = len(packing.random_tokens(None, lengths=lengths, samples=samples, packed=True)) // steps
    changes = (*sized(MEDIUM), *ON_CARD, f"adaptive.memory_limit={LIMIT}", f"tokenizer.max_seq_len={drawn.longest}")
    data = (f"epochs={epochs}", f"dataset.samples={samples}", f"dataset.lengths={lengths}", f"batch_size={batch_size}")
    with tempfile.TemporaryDirectory() as folder, turn():
        began = time.perf_counter()
        contender = packing.Contender(Path(folder) / "run", *WAYS[way], *data, *changes)
        set_up = time.perf_counter() - began
        first = contender.epoch(limited=True)
        timed = [contender.epoch(limited=True) for _ in range(epochs - 1)]
        runner = contender.recipe.runner
        row = {
            "lengths": lengths,
            "way": way,
            "target tokens/s": statistics.median(epoch.tokens_per_second for epoch in timed),
            "microbatches": timed[0].mean("microbatches"),
            "padding": timed[0].mean("padding_fraction"),
            "limit": str(runner.limit),
            "peak GiB": max(float(step["peak_memory_alloc"]) for epoch in (first, *timed) for step in epoch.steps),
            "memory limit": LIMIT,
            "recoveries": runner.recoveries,
            "set-up s": set_up,
        }
        contender.recipe.cleanup()
    return row


def searches() -> Iterator[Row]:
    """Search a model of 1.2 billion parameters; compare the found size with brute force and with sizes around it."""
    judged = run_on_ranks(1, test_search.search_and_judge, "cuda", timeout_s=240)[0]
    best = max(judged.tokens_per_second.values(), default=math.nan)
    rows = [
        {
            "search": result.strategy,
            "rows": result.rows,
            "before rounding": result.unrounded_rows,
            "brute force": judged.best,
            "probes": len(result.probes),
            "out of memory": result.out_of_memory_count,
            "flushes": sum(probe.peak.retries for probe in result.probes),
            "seconds": judged.seconds[result.strategy],
        }
        for result in (judged.linear, judged.binary)
    ]
    speeds = [
        {"search": "speed", "rows": size, "tokens/s": round(speed), "of the best": speed / best}
        for size, speed in judged.tokens_per_second.items()
    ]
    yield from (*rows, *speeds)


ROOM_GIB, ROWS_TOKENS = 10, 256
"""Memory for the search in addition to that of the model, and tokens of the longest sample."""
HEADROOMS = (math.inf, 1.1, 1.05, 1.02)
"""Limits, relative to the peak of allocated memory. Lengths are mixed, so the allocator reserves more than that."""


def fragmentation() -> Iterator[Row]:
    """Train steps of mixed lengths, first without a limit, then with so little memory that the allocator flushes.

    Rows show the flushes, the decisions of the limit policy, and the speed.
    """
    cases = [(train_mixed, headroom, 8 if ON_NULL else 60) for headroom in HEADROOMS]
    return (row for _, row in in_turns(cases, in_group=True))


def train_mixed(headroom: float, steps: int) -> Row:
    use("cuda")
    with turn():
        sizes = {**(SMALL if ON_NULL else WIDE), "vocab_size": 8192 if ON_NULL else 128_256}
        step = build(demo("full", "cuda", "dtype=bf16", **sizes), torch.device("cuda", 0))
        memory = CudaMemory()
        step.train(1, ROWS_TOKENS)
        release_memory()
        limit(torch.cuda.memory_allocated() + ROOM_GIB * GIB)
        to_search = step.to_search(ROWS_TOKENS)
        rows = find_max_batch_size(to_search, memory=memory, round_to="none", max_rows=64).rows
        to_search.runner.close()
        limit(math.inf)
        release_memory()
        memory.reset_peak()
        step.train(rows, ROWS_TOKENS)
        release_memory()
        limit(headroom * memory.peak_bytes)
        memory.reset_peak()
        retries, changes = memory.retries, list[Change]()
        runner = step.runner(rows, changes.append)
        tokens, seconds = [], []
        for number in range(steps):
            began = time.perf_counter()
            result = runner.run(samples_of(number, 2 * rows, ROWS_TOKENS, mixed=True), step=number)
            step.optimization.update(result.target_tokens)
            torch.cuda.synchronize()
            tokens.append(result.target_tokens)
            seconds.append(time.perf_counter() - began)
        return {
            "headroom": None if math.isinf(headroom) else headroom,
            "rows": rows,
            "rows at the end": runner.limit.rows,
            "peak GiB": memory.peak_bytes / GIB,
            "reserved/peak": torch.cuda.max_memory_reserved() / memory.peak_bytes,
            "flushes": memory.retries - retries,
            "out of memory": runner.recoveries,
            "tokens/s": round(sum(tokens[1:]) / sum(seconds[1:])),
            "first 10 steps": round(sum(tokens[1:11]) / sum(seconds[1:11])),
            "last 10 steps": round(sum(tokens[-10:]) / sum(seconds[-10:])),
            "decisions": "; ".join(
                f"step {change.step}: {change.kind} {change.before}->{change.after}" for change in changes
            ),
        }


OVER_GLOO = "test_gradient_after_recovery_over_gloo_is_bitwise_that_of_plain_tensor_parallelism"
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "nccl": lambda: tests("tests/gpu/test_nccl.py"),
    "recovery": lambda: tests("tests/gpu/test_allocator.py", "tests/gpu/test_recovery.py"),
    "meshes": lambda: tests("tests/gpu/test_nccl.py::" + OVER_GLOO),
    "rehearsals": rehearsals,
    "overhead": step_overhead,
    "unpadded": lambda: tests("tests/gpu/test_unpadded.py"),
    "token_budgets": token_budgets,
    "searches": searches,
    "fragmentation": fragmentation,
    "recipes": lambda: tests("tests/gpu/test_recipes.py"),
}


def main() -> None:
    part, path, *pipe = sys.argv[1:]
    if pipe:
        end_with_gpu_day(int(pipe[0]))
    if not torch.cuda.is_available():  # the tests would skip it or run on the CPU
        raise SystemExit("error: torch finds no GPU")
    with fresh_processes(), open(path, "a", encoding="utf-8", buffering=1) as file:
        for row in PARTS[part]():
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
