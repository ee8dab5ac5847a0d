"""Out-of-memory errors in steps over torch's own NCCL process groups, on null devices: `make test-nccl`.

No kernel runs, so gradients are not compared (gloo's sweeps do that, with the same cases). Every rank records its calls
of NCCL. They must be equal on all ranks, and must not end in a deadlock when they are replayed (gpu_rehearsal.hangs).

python -m tests.null.nccl                    every case; writes benchmarks/results/nccl.json
python -m tests.null.nccl --case hybrid      only the cases whose name contains "hybrid"; replaces their lines
TORCH_DIST_USE_NCCL2=0 python -m tests.null.nccl --case plain      with the class that "nccl" had before torch 2.15
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
from gpu_rehearsal.hangs.problems import problems_in
from gpu_rehearsal.hangs.replay import Replay

from benchmarks.results import RESULTS, save
from tests.distributed import models
from tests.distributed.faults.meshes import OnMesh
from tests.distributed.faults.scenarios import SCENARIOS, RecipeStage, Scenario
from tests.distributed.faults.sweeps import FIGURES, Outcome, sweep
from tests.null.processes import OnNull, null_processes
from tests.null.recording import record_on_rank
from tests.ranks import RankFailed, RanksHung
from torchtune_adaptive.atomic_files import read_json
from torchtune_adaptive.engine.fsdp_ledger import FsdpLedger
from torchtune_adaptive.engine.ghost_ledger import GhostLedger
from torchtune_adaptive.objectives.preference import POLICY
from torchtune_adaptive.rl.stages import TRAIN_POLICY

BACKENDS = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
"""All names that torch has for NCCL; torch 2.13 has only the first."""


class Checked(NamedTuple):
    """What a sweep found on all ranks together."""

    backend: str
    outcome: Outcome
    calls: int
    problems: list[str]


TIMEOUT_S = 900
NAME = "nccl"
"""Of the file of results."""


def swept(
    on_null: OnNull,
    case: Scenario,
    backend: str,
    at_most: int,
    shift: int = 0,
    function: Callable[..., Outcome] = sweep,
) -> Checked:
    """Inject errors into a step of a case, and check the recordings of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, f"cuda:{backend},cpu:gloo", function, case, at_most, False, shift)
        timeout_s = TIMEOUT_S * (4 if at_most == sys.maxsize else 1)
        try:
            found = on_null(record_on_rank, *arguments, ranks=case.world_size, in_group=False, timeout_s=timeout_s)
        except (RankFailed, RanksHung) as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            hung = isinstance(error, RanksHung)
            found = [(backend, Outcome(injected=not hung, hung=hung))]
        report = Replay(folder)
    [(name, outcome)] = {*found}
    return Checked(name, outcome, report.calls, problems_in(report))


def without_drains(*arguments: Any) -> Outcome:
    """Collective: a sweep in which failed ranks do not issue the collectives that their peers expect."""
    FsdpLedger.drain = GhostLedger.drain = lambda *_: None  # type: ignore[method-assign,assignment]
    return sweep(*arguments)


def runs_on_null(case: Scenario) -> bool:
    """Return False if the case needs computed values, or if its collectives are those of another case."""
    match case.model:
        case models.ModelConfig():
            return not case.model.joined  # the layout of samples changes no collective
        case OnMesh():
            return not case.model.needs_values
        case RecipeStage():  # every stage, and the ways to fail while a policy trains
            plain = f"recipes, {case.model.kind}, {case.model.stage}"
            return case.name == plain or case.model.stage in (POLICY, TRAIN_POLICY)
    return True


def scenarios(most: int, most_of_fsdp: int) -> Iterator[tuple[Scenario, str, int]]:
    """Yield cases with a backend and the number of operations to try: `most_of_fsdp` for FSDP2 and for hybrid sharding,
    `most` for each other case, and more on the backends that are not torch's default."""
    first = ("plain", "hybrid")
    yield from ((SCENARIOS[name], BACKENDS[0], most_of_fsdp) for name in first)
    for backend in BACKENDS[1:] if hasattr(dist, "ProcessGroupNCCL2") else ():
        # nccl-lazy counts no messages, so it does not support ghost passes
        names = first if backend == "nccl-lazy" else (*first, "tensor parallel and sharded")
        yield from ((SCENARIOS[name], backend, 4 * most) for name in names)
    others = (case for case in SCENARIOS.values() if case.name not in first and runs_on_null(case))
    yield from ((case, BACKENDS[0], most) for case in others)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--at-most", type=int, default=4, help="operations to try in a case (default: 4)")
    every = {"type": int, "default": sys.maxsize}
    arguments.add_argument("--of-fsdp", **every, help="the same for FSDP2 and hybrid sharding (default: every one)")
    arguments.add_argument("--case", default="", help="only cases whose name contains this")
    options = arguments.parse_args()
    version, found_all = torch.__version__.partition("+")[0], True
    if not options.case:
        save_rows({key: row for key, row in saved_rows().items() if row["torch"] != version})
    with null_processes() as on_null:
        for number, (case, backend, most) in enumerate(scenarios(options.at_most, options.of_fsdp)):
            if options.case not in case.name:
                continue
            began = time.monotonic()
            found = swept(on_null, case, backend, most, number)
            if backend == "nccl" and (chosen := os.environ.get("TORCH_DIST_USE_NCCL2")):
                backend = f"nccl (TORCH_DIST_USE_NCCL2={chosen})"
            row: Row = {"case": case.name, "backend": backend, "torch": version, "class": found.backend}
            row |= {"every operation": most == sys.maxsize, "ranks": case.world_size}
            row |= {**dict(zip(FIGURES, found.outcome, strict=True)), "calls": found.calls}
            row |= {"mismatches": 0, "deadlocks": 0, **Counter(map(kind_of, found.problems))}
            print(f"{row} ({time.monotonic() - began:.0f} s)", *found.problems, sep="\n", flush=True)
            found_all &= row["injected"] == row["recovered"] > 0 == row["mismatches"] + row["deadlocks"]
            save_rows(saved_rows() | {key_of(row): row})
    return 0 if found_all else 1


Row = dict[str, Any]


def key_of(row: Row) -> tuple[str, str, str]:
    return row["case"], row["backend"], row["torch"]


def saved_rows() -> dict[tuple[str, str, str], Row]:
    return {key_of(row): row for row in (read_json(RESULTS / f"{NAME}.json") or {"rows": []})["rows"]}


def save_rows(rows: dict[tuple[str, str, str], Row]) -> None:
    save(NAME, [*rows.values()], "null devices: gradients are not compared")


def kind_of(problem: str) -> str:
    return "deadlocks" if problem.startswith("deadlock") else "mismatches"


if __name__ == "__main__":
    sys.exit(main())
