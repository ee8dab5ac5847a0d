"""Modules that the server imports once, before it forks the ranks of tests."""

import gc
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]

names = [
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
    "tests.skyrl.sweeps",
    "tests.titan.sweep",
    "torch.distributed.run",
    "torchtune._cli.tune",
    *(path.stem for path in (ROOT / "recipes").glob("*.py")),
]
# recipes import many subpackages lazily
for path in sorted((ROOT / "torchtune_adaptive").rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
for name in names:
    with suppress(ImportError):  # not every environment has torchtune, PEFT and SkyRL
        import_module(name)
Image.preinit()  # the first image would do this

# torch and torchtune have many objects: without this a short run spends a third of its time on garbage collection
gc.collect()
gc.freeze()
