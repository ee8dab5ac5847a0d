"""`make faults`."""

import sys

from tests.distributed.faults.sweeps import main

if __name__ == "__main__":
    sys.exit(main())
