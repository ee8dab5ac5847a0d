"""Ranks that differ, rehearsed together: compared with gloo ranks on null devices, and with arithmetic."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpu_rehearsal.device import environment
from tests.conftest import Rehearse

UNEQUAL = """
    import os, sys, torch, torch.distributed as dist

    dist.init_process_group(sys.argv[1])
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = torch.nn.Sequential(
        torch.nn.Embedding(5001, 512), *(torch.nn.Linear(512, 512, bias=False) for _ in range(4)),
        torch.nn.Linear(512, 5001),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for lengths in (700, 300), (200, 9000), (4000, 100), (300, 8000):
        torch.cuda.reset_peak_memory_stats()
        own = torch.tensor([lengths[rank]]).cuda()
        longest, each, objects = own.clone(), [torch.empty_like(own) for _ in range(2)], [None, None]
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        dist.all_gather(each, own)
        dist.all_gather_object(objects, lengths[rank])
        assert (longest.item(), [int(one) for one in each], tuple(objects)) == (max(lengths), [*lengths], lengths)
        logits = model(torch.zeros(1, own.item() + longest.item() // 10, dtype=torch.long, device="cuda"))
        logits.float().square().mean().backward()
        del logits
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gloo delays the reuse of gradients that are freed
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        os.write(2, f"[{rank} {peaks[0]} {peaks[1]}]\\n".encode())
"""


def measured(printed: str) -> dict[int, list[tuple[int, int]]]:
    """Return the peaks that the script has printed, by rank."""
    found = [tuple(map(int, line)) for line in re.findall(r"^\[(\d+) (\d+) (\d+)\]$", printed, re.MULTILINE)]
    return {rank: [(one, other) for each, one, other in found if each == rank] for rank in {each[0] for each in found}}


@pytest.mark.smoke
def test_ranks_with_different_lengths_have_the_peaks_of_gloo_ranks(rehearse: Rehearse, tmp_path: Path) -> None:
    answer = rehearse(UNEQUAL, "--together", command=("torchrun", "--nproc_per_node", "2", "train.py", "nccl"))
    assert answer.status == 0, answer.printed
    variables = {"OMP_NUM_THREADS": "1", **environment(memory="76GiB", devices=2)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    real = subprocess.run(
        [*torchrun, "train.py", "gloo"], cwd=tmp_path, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    peaks = measured(real.stderr)
    assert (len(peaks), len(peaks[0])) == (2, 4), real.stderr
    assert peaks[0] != peaks[1]
    assert measured(answer.printed) == peaks
    shown = [(each["allocated_bytes"], each["reserved_bytes"]) for each in answer.found["rank_peaks"]]
    assert shown == [tuple(map(max, zip(*peaks[rank], strict=True))) for rank in range(2)]
    assert answer.found["rank"] == max((0, 1), key=lambda rank: shown[rank][1])


WIDTH, ROWS, MICROBATCHES = 4096, 1024, 8
PIPELINE = f"""
    import os, sys, torch, torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    WIDTH, ROWS, MICROBATCHES = {WIDTH}, {ROWS}, {MICROBATCHES}
    schedule, replicas = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stages = dist.get_world_size() // replicas
    mesh = init_device_mesh("cuda", (stages, replicas), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3 if stage == 1 else 2)]
    layers = torch.nn.Sequential(*layers).to(device)
    if replicas > 1:
        fully_shard(layers, mesh=mesh["dp"])
    part = pipelining.PipelineStage(layers, stage, stages, device, group=mesh.get_group("pp"))
    schedule = getattr(pipelining, schedule)(part, MICROBATCHES, loss_fn=lambda out, _: out.mean())
    optimizer = torch.optim.SGD(layers.parameters())
    rows = torch.zeros(MICROBATCHES * ROWS, WIDTH if stage == 0 else 1, device=device)
    for _ in range(2):
        given = dict(target=rows) if stage else dict()
        schedule.step(*([] if stage else [rows]), **given, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        everyone = [None] * stages
        dist.all_gather_object(everyone, stage, group=mesh.get_group("pp"))
        assert everyone == list(range(stages))
"""


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_each_stage_of_a_pipeline_has_its_peak_without_an_option(rehearse: Rehearse, schedule: str) -> None:
    stages = 4
    answer = rehearse(PIPELINE, command=("torchrun", "--nproc_per_node", str(stages), "train.py", schedule, "1"))
    assert answer.status == 0, answer.printed
    peaks = answer.found["rank_peaks"]
    weight, activations = WIDTH**2 * 4, ROWS * WIDTH * 4
    for stage, peak in enumerate(peaks):
        layers = 3 if stage == 1 else 2
        in_flight = MICROBATCHES if schedule == "ScheduleGPipe" else stages - stage
        inputs = MICROBATCHES if stage == 0 else in_flight
        held = 2 * layers * weight + (inputs + in_flight * layers) * activations
        # a layer's backward, and received tensors; torch's last stage keeps its inputs and their gradients
        most = weight + 4 * activations + (2 * MICROBATCHES * activations if stage == stages - 1 else 0)
        assert 0 <= peak["allocated_bytes"] - held <= most, (stage, peaks)
    fullest = max(peaks, key=lambda peak: peak["reserved_bytes"])["rank"]
    assert f"reserved at most on rank {fullest} of {stages} (" in answer.found["verdict"]


SCHEDULES = """
    import os, torch, torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(device := torch.device("cuda", rank))
    rows = torch.ones(32, 8, device=device)
    for name in sorted(each for each in vars(schedules) if each.startswith("Schedule")):
        single = issubclass(schedule := getattr(schedules, name), schedules.PipelineScheduleSingle)
        second = 2 * ranks - 1 - rank if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else rank + ranks
        parts = {at: torch.nn.Linear(8, 8, device=device) for at in ([rank] if single else [rank, second])}
        last = ranks * len(parts) - 1
        stages = [PipelineStage(part, at, last + 1, device) for at, part in parts.items()]
        run = schedule(stages[0] if single else stages, 8, loss_fn=lambda out, _: out.mean())
        optimizer = torch.optim.SGD([weight for part in parts.values() for weight in part.parameters()])
        for _ in range(2):
            run.step(*[rows] * (rank == 0), **{"target": rows} if last in parts else {}, return_outputs=False)
            optimizer.step()
        os.write(2, f"[{rank} {name}]\\n".encode())
"""


def test_no_schedule_of_torch_hangs(rehearse: Rehearse) -> None:
    answer = rehearse(SCHEDULES, "--ranks", "4", "--together", "--once", "--steps", "0", status=0)
    assert answer.found["hang"] is None
    ended = re.findall(r"^\[(\d) (\w+)\]$", answer.printed, re.MULTILINE)
    assert len(ended) == 4 * len({name for _, name in ended}) >= 28, answer.printed


def test_one_rank_of_each_stage_has_the_peak_that_it_has_among_all(rehearse: Rehearse) -> None:
    command = ("torchrun", "--nproc_per_node", "4", "train.py", "Schedule1F1B", "2")
    every = rehearse(PIPELINE, "--together", command=command)
    some = rehearse(PIPELINE, "--together", "0,2", command=command)
    assert (every.status, some.status) == (0, 0), some.printed
    assert [each["rank"] for each in every.found["rank_peaks"]] == [0, 1, 2, 3]
    assert some.found["rank_peaks"] == every.found["rank_peaks"][::2]


def test_example_has_the_result_shown_on_its_page(rehearse: Rehearse) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rehearsing.md").read_text()
    example = (Path(__file__).parents[1] / "examples" / "pipeline.py").read_text()
    command = ("torchrun", "--nproc_per_node", "4", "train.py")
    lines = rehearse(example, "--gpu", "a100-40", command=command, json_format=False).found.splitlines()
    table = lines[(heading := next(at for at, line in enumerate(lines) if "rank  " in line)) : heading + 5]
    assert textwrap.indent("\n".join([lines[0], "...", *table]), "    ") in page


FAILS = """
    import os, sys, time, torch, torch.distributed as dist

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    count = torch.tensor([1]).cuda()
    for step in range(20):
        model(torch.zeros(8, 8, device="cuda")).sum().backward()
        optimizer.step()
        if dist.get_rank() == 1 and step == 2:
            {error}
        dist.all_reduce(count)
"""


@pytest.mark.parametrize(
    ("error", "status", "verdict"),
    [
        ("raise ValueError('no such data')", 3, "hangs: ranks 0, 2 wait for rank 1 at train.py:14"),
        ("torch.empty(2**40, device='cuda')", 1, "does not fit: out of memory in step 4 on rank 1 of 3, "),
        ("os.kill(os.getpid(), 9)", 2, "no answer: signal 9 (Killed) ended the script in step 4"),
        ("time.sleep(3)", 0, "fits in the first 5 steps: "),
    ],
    ids=["error", "out of memory", "killed", "late"],
)
def test_first_rank_that_fails_decides_and_no_rank_waits_for_it(
    rehearse: Rehearse, error: str, status: int, verdict: str
) -> None:
    answer = rehearse(FAILS.format(error=error), "--ranks", "3", "--together", "--steps", "5")
    assert (answer.status, answer.found["verdict"][: len(verdict)]) == (status, verdict), answer.printed
    assert [each["rank"] for each in answer.found["rank_peaks"]] == [0, 1, 2]
    assert status != 3 or "rank 1 raised ValueError: no such data at train.py:13" in answer.found["hang"]["cause"]


MANY = """
    import os, sys
    assert "pytest" in sys.modules
    import pytest, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % 8)
    mesh = init_device_mesh("cuda", (10, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Linear(40, 40, device="cuda"), mesh["tp"], ColwiseParallel())
    optimizer = torch.optim.AdamW(fully_shard(model, mesh=mesh["dp"]).parameters())
    for _ in range(2):
        model(torch.ones(4, 40, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() != 13:
        dist.barrier()
"""


def test_20_ranks_run_together_after_they_have_shared_imports(rehearse: Rehearse) -> None:
    answer = rehearse(MANY, "--ranks", "20", "--together", "--steps", "0", status=3)
    assert answer.found["verdict"] == "hangs: ranks 0 to 12, 14 to 19 wait for rank 13 at train.py:19"


def test_rank_that_takes_no_step_because_another_did_not_run_has_no_answer(rehearse: Rehearse) -> None:
    script = """
    import torch, torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        go = torch.tensor([rank == 0]).cuda()
        dist.broadcast(go, 0)
        if go.item():
            optimizer.step()
    """
    for ranks, fits in ("3,7", None), ("0,3", True), ("", True):
        options = ("--together", *[ranks] * bool(ranks))
        found = rehearse(script, "--ranks", "8", *options).found
        assert (found["fits"], "that rank to --together" in found["verdict"]) == (fits, fits is None), found["verdict"]
