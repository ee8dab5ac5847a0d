"""The side that knows torchtune: what the recipes share, on top of the library below.

Imported before torchtune, so that notices of dependencies are hidden in time.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
