"""The start and the end of a run's process: entry point, errors, signals, silent ranks, record and lock in output_dir.

Import this before torchtune: it filters warnings of dependencies.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
