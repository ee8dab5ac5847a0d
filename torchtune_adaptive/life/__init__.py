"""How a process begins and ends, whatever it trains: its lock and its record, signals, silence, the one message.

Imported before torchtune, so that notices of dependencies are hidden in time, and Ctrl-C is no traceback.
"""

from torchtune_adaptive.dependencies import end_by_ctrl_c, hide_notices

end_by_ctrl_c()
hide_notices()
