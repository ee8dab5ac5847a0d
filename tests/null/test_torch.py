"""torch features that work on a null device: everything decided on the host."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.null.processes import OnNull
from tests.ranks import RankFailed

MIB = 2**20


def newly_reserved(waits_for: str) -> int:
    """Free memory that a side stream uses, and allocate as much. Return the MiB that the allocator reserves for it."""
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
    return (torch.cuda.memory_reserved() - before_bytes) // MIB


@pytest.mark.parametrize(
    ("waits_for", "reserved"),
    [
        *((wait, 0) for wait in ("device", "stream", "event", "another stream", "work", "polls")),
        *((wait, 64) for wait in ("nothing", "earlier event", "less work")),
    ],
)
def test_memory_of_another_stream_is_reused_only_after_its_work(waits_for: str, reserved: int, on_null: OnNull) -> None:
    assert on_null(newly_reserved, waits_for) == reserved


def seconds() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    return start.elapsed_time(end)


def test_events_measure_a_time_by_which_autotuners_can_divide(on_null: OnNull) -> None:
    assert on_null(seconds) > 0


def captured() -> tuple[int, int]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.empty(2**28, device="cuda", dtype=torch.uint8).sqrt().sum()
    graph.replay()
    torch.cuda.empty_cache()
    with_graph, _ = torch.cuda.memory_reserved(), made.item()
    del graph, made
    torch.cuda.empty_cache()
    return with_graph, torch.cuda.memory_reserved()


def test_cuda_graph_keeps_its_memory(on_null: OnNull) -> None:
    with_graph, without = on_null(captured)
    assert with_graph >= 5 * 2**28 > without


def libraries() -> dict[str, int]:
    """Return the bytes requested by operations of cuSOLVER, cuFFT and cuSPARSE, and by a kernel of NVRTC."""
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
    requested = {}
    for name, operation in operations.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        operation()
        requested[name] = torch.cuda.max_memory_allocated() - before
    return requested


def test_libraries_request_no_workspace(on_null: OnNull) -> None:
    requested = on_null(libraries)
    assert all(0 < each < 2**20 for each in requested.values()), requested


def fused_by_torchscript() -> bool:
    scripted = torch.jit.script(gelu)
    rows = torch.zeros(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):  # the third call runs the fused kernel
        scripted(rows).sum().backward()
    return rows.grad is not None


def gelu(rows: torch.Tensor) -> torch.Tensor:
    return rows * 0.5 * (1.0 + torch.erf(rows / 1.41421))


def test_torchscript_fuses_kernels(on_null: OnNull) -> None:
    assert on_null(fused_by_torchscript)


def recurrent() -> None:
    nn.LSTM(64, 64, device="cuda")


def test_recurrent_cudnn_layers_are_refused_in_one_line(on_null: OnNull) -> None:
    with pytest.raises(RankFailed, match="cuDNN error: not available on a null device"):
        on_null(recurrent)


def by_nccl() -> tuple[list[float], list[float]]:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=int(os.environ["RANK"]), world_size=2)
    on_card, on_host = torch.full((2,), 5.0).cuda(), torch.full((2,), 5.0)
    dist.all_reduce(on_card)
    dist.all_reduce(on_host)
    dist.barrier()
    return on_card.tolist(), on_host.tolist()


def test_nccl_collectives_return_and_transfer_no_data(on_null: OnNull) -> None:
    assert on_null(by_nccl, ranks=2, in_group=False) == [([5.0, 5.0], [10.0, 10.0])] * 2
