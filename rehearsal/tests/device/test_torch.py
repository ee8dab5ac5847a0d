"""torch features that work on a null device: everything decided on the host."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.processes import on_null_device

MIB = 2**20


@pytest.mark.parametrize(
    ("waits_for", "reserved"),
    [
        *((wait, 0) for wait in ("device", "stream", "event", "another stream", "work", "polls")),
        *((wait, 64) for wait in ("nothing", "earlier event", "less work")),
    ],
)
@on_null_device()
def test_memory_of_another_stream_is_reused_only_after_its_work(waits_for: str, reserved: int) -> None:
    """Free memory that a side stream uses, and allocate as much: the allocator reserves that many MiB for it."""
    side, before, after = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    used, small = torch.empty(64 * MIB, device="cuda", dtype=torch.uint8), torch.empty(1, device="cuda")
    before.record()
    with torch.cuda.stream(side):
        used.add_(1)
        used.record_stream(side)
        del used
        after.record()
    match waits_for:
        case "device":
            torch.cuda.synchronize()
        case "stream":
            side.synchronize()
        case "event":
            after.synchronize()
        case "another stream":
            torch.cuda.default_stream().wait_event(after)
            small.item()
        case "earlier event":
            before.synchronize()
            small.item()
        case "work":
            for _ in range(1024):
                small.add_(1)
        case "less work":
            for _ in range(100):
                small.add_(1)
        case "polls":
            while not after.query():
                pass
    before_bytes = torch.cuda.memory_reserved()
    torch.empty(64 * MIB, device="cuda", dtype=torch.uint8)
    assert (torch.cuda.memory_reserved() - before_bytes) // MIB == reserved


@on_null_device()
def test_cuda_graph_keeps_its_memory() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.empty(2**28, device="cuda", dtype=torch.uint8).sqrt().sum()
    graph.replay()
    torch.cuda.empty_cache()
    with_graph, _ = torch.cuda.memory_reserved(), made.item()
    del graph, made
    torch.cuda.empty_cache()
    assert with_graph >= 5 * 2**28 > torch.cuda.memory_reserved()


@on_null_device()
def test_libraries_request_no_workspace() -> None:
    """Operations of cuSOLVER, cuFFT and cuSPARSE, and a kernel of NVRTC."""
    square = torch.zeros(64, 64, device="cuda")
    sparse = torch.eye(64).to_sparse_csr().to("cuda")
    operations: dict[str, Callable[[], object]] = {
        "qr": lambda: torch.linalg.qr(square),
        "cholesky": lambda: torch.linalg.cholesky(square),
        "svd": lambda: torch.linalg.svd(square),
        "eigh": lambda: torch.linalg.eigh(square),
        "fft": lambda: torch.fft.fft(square),
        "sparse": lambda: sparse @ sparse,
        "prod": lambda: square.prod(-1),
    }
    for name, operation in operations.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        operation()
        assert 0 < torch.cuda.max_memory_allocated() - before < 2**20, name


@on_null_device()
def test_recurrent_cudnn_layers_are_refused_in_one_line() -> None:
    with pytest.raises(RuntimeError, match="cuDNN error: not available on a null device"):
        nn.LSTM(64, 64, device="cuda")


@pytest.mark.smoke
@on_null_device()
def test_nccl_collectives_return_and_transfer_no_data(tmp_path: Path) -> None:
    rank = int(os.fork() == 0)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    on_card, on_host = torch.full((2,), 5.0).cuda(), torch.full((2,), 5.0)
    dist.all_reduce(on_card)
    dist.all_reduce(on_host)
    dist.barrier()
    if rank:
        os._exit(0)
    assert (on_card.tolist(), on_host.tolist()) == ([5.0, 5.0], [10.0, 10.0])
