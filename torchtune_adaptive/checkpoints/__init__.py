"""A checkpoint is complete, or it does not exist; a run finds its last one by itself.

Imported before torchtune, so that notices of dependencies are hidden in time, and Ctrl-C is no traceback.
"""

from torchtune_adaptive.dependencies import end_by_ctrl_c, hide_notices

end_by_ctrl_c()
hide_notices()
