"""How the process of a run starts and ends: entry point, record and lock in output_dir, signals, silent ranks, errors.

Import this before torchtune: it filters warnings of dependencies.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
