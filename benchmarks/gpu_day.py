"""Measurements that need a GPU, the most valuable first, for a few minutes on a GPU without a network.

    python -m benchmarks.gpu_day [--only recovery rehearsals ...] [--into FOLDER]

Each part runs in its own processes, with a time limit. Its result is saved to gpu_PART.json at once, with card, driver
and versions, whether it succeeds or fails. A part that is stopped keeps the rows that it has. On a null device all
parts run, but times and losses mean nothing:

    python -m torchtune_adaptive.null_cuda --memory 80GB -- python -m benchmarks.gpu_day --into /tmp/null
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, machine, table
from torchtune_adaptive.atomic_files import replace_file

LIMITS_S = {
    "recovery": 180,
    "meshes": 90,
    "rehearsals": 180,
    "overhead": 150,
    "token_budgets": 180,
    "unpadded": 150,
    "searches": 150,
    "fragmentation": 150,
    "recipes": 240,
}
"""Time limit of every part, in order of value."""
SHOWN_LINES, SHOWN_BYTES = 30, 2**18


def card() -> dict[str, Any]:
    """Describe the GPU, its driver and the libraries that torch uses."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: torch finds no GPU; to try gpu_day without one, see --help")
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # older than the one that torch was built with
        print(f"cuDNN's attention is disabled: {error}")
        os.environ["PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"] = "1"
        cudnn = torch._C._cudnn.getVersionInt()
    attention = os.environ.get("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK") != "1"
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu memory": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "cudnn attention": attention,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=20, check=True)
            .stdout.decode(errors="replace")
            .partition("\n")[0]
        )
    except (OSError, subprocess.SubprocessError):
        return None


def run(part: str, limit_s: float) -> dict[str, Any]:
    """Run a part; return its status, duration and rows, or the end of its output if it failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+b") as log:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", part, str(rows)]
        variables = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=variables)
        try:
            status = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            _end(process)
        found = list(_rows_in(rows))
        log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
        output = log.read().decode(errors="replace").splitlines()
    seconds = round(time.monotonic() - began, 1)
    result = {"part": part, "status": status, "seconds": seconds, "rows": found}
    return result if status == "done" and found else {**result, "output": output[-200:]}


def _rows_in(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line may be incomplete
            yield json.loads(line)


def save(path: Path, result: dict[str, Any]) -> str:
    """Write a result, and return a line about it. A worse result does not replace a good one."""
    try:
        if path.exists() and result["status"] != "done" and json.loads(path.read_bytes()).get("rows"):
            path = path.with_suffix(".failed.json")
        replace_file(path, (json.dumps(result, indent=2) + "\n").encode())
    except (OSError, ValueError) as error:
        return f"not saved, because {path} cannot be written ({error}): {json.dumps(result)}"
    return f"saved to {path}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the part's processes; they share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _factor(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("allowed is a number above 0")
    return value


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list(LIMITS_S)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="where results are saved")
    parser.add_argument("--patience", type=_factor, default=1.0, help="factor on the time limits")
    options = parser.parse_args()
    about = {**machine(), **card()}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends the running part, too
    if about["gpu"].startswith("null device") and options.into.resolve() == RESULTS.resolve():
        raise SystemExit("error: results of a null device mean nothing: pass --into with another folder")
    try:
        options.into.mkdir(parents=True, exist_ok=True)
        replace_file(options.into / ".writable", bytes(4096))
        (options.into / ".writable").unlink()
        fcntl.flock(os.open(options.into, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError as error:
        raise SystemExit(f"error: another gpu_day saves to {options.into}: wait, or pass another --into") from error
    except OSError as error:
        raise SystemExit(f"error: {options.into} cannot be written ({error.strerror}): pass another --into") from error
    print(json.dumps(about), flush=True)
    summary = []
    for part in dict.fromkeys(options.only):
        result = run(part, options.patience * LIMITS_S[part])
        saved = save(options.into / f"gpu_{part}.json", {"machine": about, **result})
        print(f"\n{part}: {result['status']}, {result['seconds']} s, {saved}", flush=True)
        if result["rows"]:
            print(table(_aligned(result["rows"])), flush=True)
        for line in result.get("output", [])[-SHOWN_LINES:]:
            print("  |", line, flush=True)
        if about["gpu"].startswith("null device"):
            print("a null device computes nothing: times and losses mean nothing")
        summary.append({name: result[name] for name in ("part", "status", "seconds")})
        if result["status"] == "interrupted":
            break
    print(f"\n{table(summary)}")
    if any(each["status"] != "done" for each in summary):
        raise SystemExit(1)


def _aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same columns."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


if __name__ == "__main__":
    main()
