"""Atomic checkpoints, and the search for the one that a run resumes from.

Import this before torchtune: it filters warnings of dependencies.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
