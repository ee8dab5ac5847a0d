"""Command line, keys, checked settings and components.

Import this package before torchtune: it filters warnings of dependencies and handles Ctrl-C.
"""

from torchtune_adaptive.dependencies import prepare_recipe

prepare_recipe()
