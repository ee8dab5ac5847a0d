"""What all tests need of the process that they run in."""

import signal

# A shell starts what it puts into the background with SIGINT ignored, and whatever is started from there inherits that:
# runs that are to be ended by Ctrl-C would not hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
