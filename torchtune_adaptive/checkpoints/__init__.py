"""A checkpoint is complete, or it does not exist; a run finds its last one by itself.

Imported before torchtune, so that notices of dependencies are hidden in time.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
