"""The side that knows torchtune: what the recipes share, on top of the library below.

Imported first of all, this quiets what dependencies print at import, once on every rank.
"""

from torchtune_adaptive.tune import quiet as quiet
