"""Scripts that several files of tests rehearse, and the lines of scripts that reports name."""

from textwrap import dedent

GIB = 2**30

TRAINS = """
    import sys, torch

    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in map(int, sys.argv[1:]):
        torch.cuda.reset_peak_memory_stats()
        loss = model(torch.randn(rows, 4096, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        optimizer.zero_grad()
        state = torch.tensor([7.0], device="cuda")
        print(f"[{rows}, {peaks[0]}, {peaks[1]}, {retries}, {loss.item()}, {state.tolist()}]")
"""

WEIGHTS = 4 * 4096 * 4096 * 4

SHARDED = """
    import sys, torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False) for _ in range(4)])
    for layer in [*model, model]:
        fully_shard(layer)
    model.to_empty(device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.randn(int(sys.argv[1]), 8192, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank())
    print("ranks", everyone, "allocated", torch.cuda.memory_allocated())
"""

ONE_STEP = """
    import os, sys, torch, torch.distributed as dist

    model = torch.nn.Linear(1024, 1024).cuda()
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    print("ranks", os.environ.get("WORLD_SIZE"), "cards", torch.cuda.device_count(), sys.path.count(os.getcwd()))
"""


def lines_of(places: list[str]) -> list[int]:
    """Return the lines of places in the script, without those in libraries."""
    return [int(each.rpartition(":")[2]) for each in places if each.startswith("train.py:")]


def marked(script: str) -> list[int]:
    """Return the lines that end with the comment "guessed"."""
    lines = dedent(script).splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# guessed")]
