"""What Python imports before anything else in every process of a `tune run` that is to be killed."""

import os
import sys

# of the launcher's processes only the ranks: it has no rank itself
if "RANK" in os.environ or "--nproc_per_node" not in sys.orig_argv:
    from tests.recipes.crash import trap
    from tests.recipes.crash.points import read_order

    trap.install(read_order(), int(os.environ.get("RANK", "0")))
