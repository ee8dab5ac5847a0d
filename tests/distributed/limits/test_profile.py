"""The surfaces of a profile on several ranks."""

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.searched_model import Shape, Trained
from torchtune_adaptive.engine.length_profile import Profile
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.probes import profile_memory


def profile_if_one_rank_rounds_badly() -> Profile:
    """Collective: return the profile of this rank, if the fits of rank 1 are 2 % too small."""
    if dist.get_rank() == 1:
        exact = np.linalg.lstsq
        np.linalg.lstsq = lambda *args, **options: (0.98 * exact(*args, **options)[0], None)
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        meter.cap_bytes = meter.live_bytes + 1_000_000
        return profile_memory(replace(trained.step(), cut=lambda sample, length: sample[:length]), memory=meter)


def test_ranks_whose_fits_differ_use_the_surfaces_of_rank_0():
    first, second = run_on_ranks(2, profile_if_one_rank_rounds_badly)
    assert first == second
