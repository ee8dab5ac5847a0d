"""What the server that forks ranks for tests has imported before, so that none of them has to."""

import gc
from importlib import import_module
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]

for name in (
    # a rank imports the module of the function that it runs, and those of tests have these
    "hypothesis",
    "pytest",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tests.commands",
    "tests.distributed.faults.sweeps",
    "tests.recipes.recording",
    "tests.recipes.ppo.rollouts",
    "tests.recipes.running",
    "tests.searching",
    "torch.distributed.run",
    "torchtune._cli.tune",
    "torchtune_adaptive.testing",
    *(path.stem for path in (ROOT / "recipes").glob("*.py")),
):
    import_module(name)
# a recipe imports many rooms only where it needs them
for path in sorted((ROOT / "torchtune_adaptive").rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
Image.preinit()  # which the first picture would do

# torch and torchtune are a lot to look through: without this a third of a short run is collecting garbage
gc.collect()
gc.freeze()
