"""Tensor parallelism, whose collectives carry activations: what a failed rank still owes, learned without data."""

from torchtune_adaptive.comm.tensor.ledger import TensorLedger
from torchtune_adaptive.comm.tensor.shadow import Rehearsal

__all__ = ["Rehearsal", "TensorLedger"]
