"""How a run starts and ends: the lock on its output directory, its record, signals, silent ranks, the error message.

Import this before torchtune: it filters warnings of dependencies and handles Ctrl-C.
"""

from torchtune_adaptive.dependencies import prepare_recipe

prepare_recipe()
