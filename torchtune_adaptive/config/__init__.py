"""The command line, the config's keys and their checks, and components that are built from the config.

Import this package before torchtune, because it hides warnings of dependencies.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
