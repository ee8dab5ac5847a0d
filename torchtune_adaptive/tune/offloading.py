"""Activation offloading that can be run again after a pass has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchtune.training import OffloadActivations

P = ParamSpec("P")
T = TypeVar("T")


def leaving_nothing_offloaded(run: Callable[P, T], offloaded: OffloadActivations) -> Callable[P, T]:
    """Wraps a pass: if it raises, forgets the activations that wait for a backward that will not come."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except BaseException:
            _forget(offloaded)
            raise

    return guarded


def _forget(offloaded: OffloadActivations) -> None:
    """Brings torchtune's bookkeeping back to between two passes."""
    for stash in ("tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"):
        getattr(offloaded, stash, {}).clear()
    offloaded.is_first_forward_call = True
    offloaded.is_first_backward_call = True
    if offloaded.use_streams:
        offloaded.curr_graph_id = None
        offloaded.curr_autograd_node = None
