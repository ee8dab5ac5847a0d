"""How a process begins and ends, whatever it trains: its lock and its record, signals, silence, the one message.

Imported before torchtune, so that notices of dependencies are hidden in time.
"""

from torchtune_adaptive.dependencies import hide_notices

hide_notices()
