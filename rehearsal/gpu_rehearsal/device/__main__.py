"""Print the variables of null devices: `env $(python -m gpu_rehearsal.device 80GB) python train.py`."""

import re
import sys

from gpu_rehearsal.device import environment

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    variables = environment(memory=sys.argv[1])
    # a shell splits the output of $(...) at spaces
    variables["PATH"] = ":".join(each for each in variables["PATH"].split(":") if not re.search(r"\s", each))
    print(*(f"{name}={value}" for name, value in variables.items()))
