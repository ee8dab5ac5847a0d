"""Searches, fragmentation and thrashing with torch's allocator; writes benchmarks/results/null_sizes_VERSION.json.

python -m tests.null.sizes
"""

import sys
from typing import Any

import torch

from benchmarks.results import save
from tests.null.full_size_models import TOKENS, budgeted, crowded, drift, searched
from tests.null.processes import null_processes

GB = 10**9
STEPS = 500


def main() -> int:
    rows: list[dict[str, Any]] = []

    def tell(what: str, **figures: Any) -> None:
        rows.append({"what": what, **figures})
        print(what, figures, flush=True)

    with null_processes() as on_null:
        for layers, held in ((4, 16), (16, 4)):
            for expandable in (False, True):
                steps = on_null(drift, layers, held, STEPS, expandable, timeout_s=300)
                probe = steps.probe_reserved_bytes
                tell(
                    f"{STEPS} steps of mixed lengths after a probe",
                    layers=layers,
                    rows=held,
                    expandable=expandable,
                    reserved_over_allocated=round(probe / steps.probe_allocated_bytes, 4),
                    reserved_over_probe=round(max(steps.reserved_bytes) / probe, 4),
                )
        for memory in (16 * GB, 24 * GB, 40 * GB):
            for expandable in (False, True):
                found = on_null(searched, 4, memory, 50, expandable)
                tell("search", memory=memory, expandable=expandable, **found._asdict())
        for expandable in (False, True):
            budget = on_null(budgeted, 4, 24 * GB, 8, expandable)
            tell("token budget", memory=24 * GB, expandable=expandable, **budget._asdict())
        for flush_s, microbatch_s in ((0.3, 0.01), (0.0, 0.3)):
            decided = on_null(crowded, 4, 24 * GB, 12, flush_s, microbatch_s)
            tell("thrashing", flush_s=flush_s, microbatch_s=microbatch_s, **decided._asdict())
    version = torch.__version__.split("+")[0]
    save(f"null_sizes_{version}", rows, f"layers of Llama 3.2 1B, rank 0 of 8, up to {TOKENS} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
