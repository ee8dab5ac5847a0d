"""Command line, keys, checked settings and components.

Import this package before torchtune: it filters warnings of dependencies.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
