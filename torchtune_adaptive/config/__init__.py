"""From a command line to checked settings: keys, sections as objects, and errors that name the key.

Import this before torchtune: it filters warnings of dependencies and handles Ctrl-C.
"""

from torchtune_adaptive.dependencies import prepare_recipe

prepare_recipe()
