"""Tests of recovery in torchtitan's Trainer, with torchtitan itself. `make test-titan` runs them."""

from importlib.util import find_spec

import torch

if find_spec("torchtitan"):
    # torchtitan calls it once, when it is imported
    torch._utils._get_available_device_type = lambda: "cuda" if torch.cuda.is_available() else "cpu"
