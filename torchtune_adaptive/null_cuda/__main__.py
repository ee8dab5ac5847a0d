"""Print the variables of null devices: `env $(python -m torchtune_adaptive.null_cuda 80GB) python train.py`."""

import sys

from torchtune_adaptive.null_cuda import environment

if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in environment(memory=sys.argv[1]).items()))
