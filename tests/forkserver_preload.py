"""Modules that the server imports once, before it forks the ranks of tests."""

import gc
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]

if find_spec("skyrl"):  # its environment has no torchtune
    import_module("tests.skyrl.sweeps")
for name in (
    # a rank imports the module of its function; test modules import these
    "hypothesis",
    "pytest",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tests.forked_commands",
    "tests.distributed.faults.sweeps",
    "tests.recipes.recorders",
    "tests.recipes.ppo.rollouts",
    "tests.recipes.running",
    "tests.searched_model",
    "torch.distributed.run",
    "torchtune._cli.tune",
    *(path.stem for path in (ROOT / "recipes").glob("*.py")),
):
    import_module(name)
# recipes import many subpackages lazily
for path in sorted((ROOT / "torchtune_adaptive").rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
Image.preinit()  # the first image would do this

# torch and torchtune have many objects: without this a short run spends a third of its time on garbage collection
gc.collect()
gc.freeze()
