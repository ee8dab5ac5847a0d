"""Python imports this first in every process of a `tune run` under test."""

import os
import sys

# only in ranks: the launcher has no rank
if "RANK" in os.environ or "--nproc_per_node" not in sys.orig_argv:
    from tests.recipes.crash import hook
    from tests.recipes.crash.hook import read_order

    hook.install(read_order(), int(os.environ.get("RANK", "0")))
