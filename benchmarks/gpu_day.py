"""Run the measurements that need a GPU, the most important first. They need no network.

    python -m benchmarks.gpu_day [--only recovery rehearsals ...] [--into FOLDER]

Without --only, all parts run except meshes, unpadded and recipes. Each part runs in its own processes, with a time
limit. Its result is saved to gpu_PART.json at once, with card, driver and versions, whether it succeeds or fails. A
part that is stopped keeps the rows that it has. On a null device all parts run, but times and losses are meaningless:

    env $(python -m gpu_rehearsal.device 80GB) python -m benchmarks.gpu_day --into /tmp/null
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_rehearsal.device.build import LIBRARY

from benchmarks.results import RESULTS, machine, table
from torchtune_adaptive.atomic_files import read_json, reason, replace_file

LIMITS_S = {
    "nccl": 180,
    "recovery": 180,
    "rehearsals": 180,
    "overhead": 180,
    "token_budgets": 180,
    "searches": 150,
    "fragmentation": 120,
    "meshes": 240,
    "unpadded": 150,
    "recipes": 240,
}
"""Time limit in seconds of each part, the most important first."""
BY_NAME = ("meshes", "unpadded", "recipes")
"""Parts that run only if `--only` names them."""
SHOWN_LINES, SHOWN_BYTES = 30, 2**18
LEAKS = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")
"""Prefixes of lines that triton's bindings print at exit after an error. There are more of them than `SHOWN_LINES`."""
ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def card() -> dict[str, Any]:
    """Describe the GPU, its driver and the libraries that torch uses."""
    import torch

    if not torch.cuda.device_count():
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
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        open(Path(folder) / "log", "w+b") as log,
        _open_while_this_process_lives() as pipe,
    ):
        rows = Path(folder) / "rows.jsonl"
        process = subprocess.Popen(
            command(part, rows, pipe),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[pipe],
            env={**os.environ, "TMPDIR": folder},
        )
        try:
            status = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        except KeyboardInterrupt:
            for number in SIGNALS:  # a second one would lose the rows
                signal.signal(number, signal.SIG_IGN)
            status = "interrupted"
        finally:
            _end(process)
        found = list(_rows_in(rows))
        log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        output = [line for line in lines if not line.startswith(LEAKS)]
    seconds = round(time.monotonic() - began, 1)
    result = {"part": part, "status": status, "seconds": seconds, "rows": found}
    return result if status == "done" and found else {**result, "output": output[-200:]}


def command(part: str, rows: Path, pipe: int) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", part, str(rows), str(pipe)]


@contextmanager
def _open_while_this_process_lives() -> Iterator[int]:
    """Yield the end of a pipe for `end_with_gpu_day`."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with_gpu_day(pipe: int) -> None:
    """Kill this part's processes when gpu_day ends, because they would disturb the next measurement."""

    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _rows_in(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line may be incomplete
            yield json.loads(line)


def save(path: Path, result: dict[str, Any]) -> Path:
    """Write a result, and return where. A worse result does not replace a good one. Raises OSError."""
    if not _replaces(result, path):
        path = path.with_suffix(".failed.json")
    replace_file(path, (json.dumps(result, indent=2) + "\n").encode())
    return path


def _replaces(result: dict[str, Any], path: Path) -> bool:
    """Return True if a result is complete, or has at least as many rows as an incomplete one at this path."""
    if _is_complete(result):
        return True
    try:
        before = read_json(path)
        return before is None or (not _is_complete(before) and len(result["rows"]) >= len(before["rows"]))
    except (ValueError, LookupError, TypeError, AttributeError):  # not a result, or another version's
        return False


def _is_complete(result: dict[str, Any]) -> bool:
    return result["status"] == "done" and any(row.get("outcome") != "skipped" for row in result["rows"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the part's processes; they share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _factor(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _say(text: str) -> None:
    """Print. A closed pipe or a full disk does not end the measurements."""
    with suppress(OSError):
        print(text, flush=True)


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list(LIMITS_S)
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        choices=parts,
        metavar="PART",
        help=", ".join(f"{part} ({limit} s at most)" for part, limit in LIMITS_S.items()),
    )
    usual = [part for part in parts if part not in BY_NAME]
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="FOLDER", help="where results are saved (benchmarks/results)"
    )
    parser.add_argument("--patience", type=_factor, default=1.0, metavar="FACTOR", help="factor on the time limits")
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # parts print characters that the locale may not have
    about = {**machine(), **card()}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # ends the running part, too
    on_null = LIBRARY in os.environ.get("LD_PRELOAD", "")
    with _locked(options.into, on_null=on_null):
        summary = measure(options.only or usual, options.into, options.patience, about, on_null=on_null)
    if any(each["status"] != "done" for each in summary):
        raise SystemExit(1)


@contextmanager
def _locked(into: Path, *, on_null: bool) -> Iterator[None]:
    """Lock the folder of results, or exit with an error if that is impossible."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        if on_null and into.samefile(RESULTS):
            raise SystemExit("error: results of a null device are meaningless: pass --into with another folder")
        replace_file(into / ".writable", bytes(4096))
        (into / ".writable").unlink()
        lock = os.open(into / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(f"error: another gpu_day saves to {into}: wait, or pass another --into") from error
    except OSError as error:
        raise SystemExit(f"error: {into} cannot be written ({error.strerror}): pass another --into") from error
    try:
        yield
    finally:
        os.close(lock)


def measure(
    parts: Sequence[str], into: Path, patience: float, about: dict[str, Any], *, on_null: bool
) -> list[dict[str, Any]]:
    """Run parts, save their results and print their tables; return a row for each."""
    _say(json.dumps(about))
    summary = []
    for part in dict.fromkeys(parts):
        limit_s = patience * LIMITS_S[part]
        _say(f"\n{part}, up to {limit_s:.0f} s ...")
        result = run(part, limit_s)
        status, path, content = result["status"], into / f"gpu_{part}.json", {"machine": about, **result}
        try:
            saved = f"saved to {save(path, content)}"
        except OSError as error:
            status += ", not saved"
            saved = f"but {path} cannot be written ({reason(error)}): {json.dumps(content)}"
        _say(f"\n{part}: {status}, {result['seconds']} s, {saved}")
        if result["rows"]:
            _say(table(_aligned(result["rows"])))
        for line in result.get("output", [])[-SHOWN_LINES:]:
            _say(f"  | {line}")
        if on_null:
            _say("a null device executes no kernels: times, losses and memory that depends on values are meaningless")
        summary.append({"part": part, "status": status, "seconds": result["seconds"]})
        if result["status"] == "interrupted":
            break
    _say(f"\n{table(summary)}")
    return summary


def _aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same columns."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted while no part was running; results of earlier parts are saved") from None
