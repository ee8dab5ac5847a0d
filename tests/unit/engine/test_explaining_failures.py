"""What ranks are told about a collective that failed."""

import pytest
import torch

from torchtune_adaptive.engine.ranks import explaining_failures
from torchtune_adaptive.errors import UnrecoverableError

NCCL = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


def explained(error: Exception) -> str:
    with pytest.raises(UnrecoverableError) as raised, explaining_failures("an FSDP collective"):
        raise error
    assert raised.value.__cause__ is error
    return str(raised.value)


def test_nccl_out_of_memory_is_a_broken_communicator_and_not_a_step_to_repeat():
    text = explained(torch.distributed.DistBackendError(NCCL))
    assert "an FSDP collective failed on rank 0" in text
    assert "communicator is broken" in text
    assert text.endswith(
        "; if CUDA was out of memory, leave more memory to NCCL: give CudaMemory a limit, for example 0.9"
    )


def test_any_other_failure_is_a_peer_or_the_network():
    text = explained(RuntimeError("Connection closed by peer"))
    assert "another rank has exited or the network has failed" in text
    assert "communicator" not in text


def test_running_out_of_memory_before_a_collective_stays_what_it_is():
    with pytest.raises(torch.OutOfMemoryError), explaining_failures("an FSDP collective"):
        raise torch.OutOfMemoryError
