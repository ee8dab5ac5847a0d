"""All measurements on null devices: python -m tests.null"""

import sys

from tests.null import recovery, sizes

if __name__ == "__main__":
    sys.exit(recovery.main() or sizes.main())
