"""Keeps the notices of dependencies away from users, who can do nothing about them.

Each entry names what it is for. Warnings about the user's own config or data are not touched.
"""

import logging
import warnings


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()


# torchao looks for compiled extensions of its own that no recipe uses
logging.getLogger("torchao").addFilter(_Without("cpp extensions"))
# torchdata 0.11 calls what torch 2.13 has deprecated
warnings.filterwarnings("ignore", message=".*set_vital.*")
# torchtune's profiler asks for XPU unless the config says otherwise
warnings.filterwarnings("ignore", message="XPU is not available")
