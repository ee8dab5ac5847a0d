"""Tests of the adaptive workers for SkyRL, with SkyRL itself. `make test-skyrl` runs them.

Before SkyRL is imported, this module replaces what it needs, but a CPU or this version of Python does not have.
"""

import importlib.machinery
import sys
import types
import typing
from importlib.util import find_spec


def make_importable() -> None:
    """Ray calls this in every worker process."""
    import typing_extensions
    from transformers import initialization, modeling_utils

    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # as pydantic requires
    if find_spec("flash_attn") is None:  # its installation needs CUDA's compiler; no test calls it
        for name in ("flash_attn", "flash_attn.bert_padding"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(sys.modules[name]).update(pad_input=None, unpad_input=None, __path__=[])
    # SkyRL 0.4.0 imports it from its former module
    modeling_utils.no_init_weights = initialization.no_init_weights


if find_spec("skyrl"):
    make_importable()
