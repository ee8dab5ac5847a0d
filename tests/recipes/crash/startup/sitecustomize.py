"""Python imports this first in every process of a `tune run` under test."""

import os
import sys

# only in ranks: the launcher has no rank
if "RANK" in os.environ or "--nproc_per_node" not in sys.orig_argv:
    from tests.recipes.crash import kill_hook
    from tests.recipes.crash.kill_points import read_order

    kill_hook.install(read_order(), int(os.environ.get("RANK", "0")))
