"""From a command line to checked values: keys, sections as objects, and errors that name the key.

Imported before torchtune, so that notices of dependencies are hidden in time.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
