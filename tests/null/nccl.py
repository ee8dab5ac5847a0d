"""Out-of-memory errors in steps over torch's own NCCL process groups, on null devices: `make test-nccl`.

No kernel runs, so gradients are not compared (gloo's sweeps do that, with the same cases). Every rank records its calls
of NCCL. They must be equal on all ranks, and must not end in a deadlock when they are replayed (null_cuda/check.py).

python -m tests.null.nccl                    every case; writes benchmarks/results/nccl.json
python -m tests.null.nccl --case hybrid      only the cases whose name contains "hybrid"
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.results import save
from tests.distributed import models
from tests.distributed.faults.finetuning import CASES
from tests.distributed.faults.meshes import MESH_CASES
from tests.distributed.faults.recipes import RECIPE_CASES
from tests.distributed.faults.sweeps import FIGURES, AnyCase, Outcome, sweep
from tests.null.processes import OnNull, null_processes
from tests.ranks import RankFailed, RanksHung
from torchtune_adaptive.engine.collectives import CollectiveLedger
from torchtune_adaptive.null_cuda import set_card
from torchtune_adaptive.null_cuda.check import Replay
from torchtune_adaptive.rehearse.recording import start_recording

BACKENDS = ("nccl", "nccl-lazy", "nccl-legacy")


class Checked(NamedTuple):
    """What a sweep found on all ranks together."""

    backend: str
    outcome: Outcome
    calls: int
    problems: list[str]


DEVICES, TIMEOUT_S = 4, 900


def compute_sizes_of_objects() -> None:
    """Let object collectives compute the sizes of objects on the host, because a null device computes nothing."""
    for name, function in [(name, each) for name, each in vars(dist).items() if "_object" in name and callable(each)]:
        setattr(dist, name, _with_sizes(function))
        setattr(dist.distributed_c10d, name, getattr(dist, name))


def _with_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return function(*args, **kwargs)

    return call


class _OnHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__gt__", "__radd__", "add", "cat", "gt", "max", "sum"):
            return func(*args, **kwargs or {})
        device = next(each for each in tree_iter(args) if isinstance(each, torch.Tensor)).device
        return func(*tree_map(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each, args)).to(device)


def record_on_rank(folder: str, backend: str, function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Collective: run a function in a process group over NCCL, and record its calls."""
    os.environ.update(NULL_CUDA_RECORD=folder)
    set_card(memory=80 * 2**30, devices=DEVICES)
    start_recording()
    compute_sizes_of_objects()
    dist.init_process_group(backend)
    models.use_gpu()
    name = type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__
    found = function(*args)
    torch.cuda.synchronize()
    return name, found


def swept(
    on_null: OnNull, case: AnyCase, backend: str, at_most: int, shift: int = 0, function: Callable[..., Outcome] = sweep
) -> Checked:
    """Inject errors into a step of a case, and check the recordings of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, f"cuda:{backend},cpu:gloo", function, case, at_most, False, shift)
        try:
            found = on_null(record_on_rank, *arguments, ranks=case.world_size, in_group=False, timeout_s=TIMEOUT_S)
        except (RankFailed, RanksHung) as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            hung = isinstance(error, RanksHung)
            found = [(backend, Outcome(injected=not hung, hung=hung))]
        report = Replay(folder)
    [(name, outcome)] = {*found}
    return Checked(name, outcome, report.calls, report.problems)


def without_drains(*arguments: Any) -> Outcome:
    """Collective: a sweep in which failed ranks do not issue the collectives that their peers expect."""
    CollectiveLedger.drain = lambda *_: None  # type: ignore[method-assign]
    return sweep(*arguments)


def scenarios(most: int, most_of_fsdp: int) -> Iterator[tuple[AnyCase, str, int]]:
    """Yield cases with a backend and the number of operations to try: `most_of_fsdp` for FSDP2 and for hybrid sharding,
    `most` for each other case, and more on the backends that are not torch's default."""
    joined = [case for case in CASES if not case.model.joined]  # the layout of samples changes no collective
    routed = [case for case in MESH_CASES if not case.name.startswith("sharded experts")]  # sizes depend on values
    on_pairs = [
        case for case in RECIPE_CASES if case.kind == "full_dpo" and case.name.endswith(("policy", "drain too"))
    ]
    named: dict[str, AnyCase] = {case.name: case for case in (*joined, *routed, *on_pairs)}
    yield from ((named[name], BACKENDS[0], most_of_fsdp) for name in ("plain", "hybrid"))
    for backend in BACKENDS[1:]:
        yield from ((named[name], backend, 4 * most) for name in ("plain", "hybrid"))
    # nccl-lazy counts no messages, so it does not support ghost passes
    yield named["tensor parallel and sharded"], "nccl-legacy", 4 * most
    yield from ((case, BACKENDS[0], most) for case in named.values() if case.name not in ("plain", "hybrid"))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--at-most", type=int, default=4, help="operations to try in a case (default: 4)")
    every = {"type": int, "default": sys.maxsize}
    arguments.add_argument("--of-fsdp", **every, help="the same for FSDP2 and hybrid sharding (default: every one)")
    arguments.add_argument("--case", default="", help="only cases whose name contains this")
    options = arguments.parse_args()
    rows = []
    with null_processes() as on_null:
        for number, (case, backend, most) in enumerate(scenarios(options.at_most, options.of_fsdp)):
            if options.case not in case.name:
                continue
            began = time.monotonic()
            found = swept(on_null, case, backend, most, number)
            every = {"every operation": most == sys.maxsize, "ranks": case.world_size}
            counted = dict(zip(FIGURES, found.outcome, strict=True))
            rows.append({"case": case.name, "class": found.backend, **every, **counted, "calls": found.calls})
            rows[-1] |= {"mismatches": 0, "deadlocks": 0, **Counter(map(kind_of, found.problems))}
            print(f"{rows[-1]} ({time.monotonic() - began:.0f} s)", *found.problems, sep="\n", flush=True)
            if not options.case:
                save("nccl", rows, "null devices: gradients are not compared")
    return (
        0 if all(row["injected"] == row["recovered"] > 0 == row["mismatches"] + row["deadlocks"] for row in rows) else 1
    )


def kind_of(problem: str) -> str:
    return "deadlocks" if problem.startswith("deadlock") else "mismatches"


if __name__ == "__main__":
    sys.exit(main())
