"""Results of `rehearse` for small scripts, compared with the scripts' own measurements."""

import json
import re
import shutil
import signal
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from gpu_rehearsal.command import main
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.values.device_values import _LIMITS
from tests.conftest import Rehearse
from tests.processes import skip_without_null_device

ROOT = Path(__file__).parents[1]
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


def test_each_step_has_the_peaks_and_flushes_measured_by_the_script(rehearse: Rehearse) -> None:
    # weights, gradients and moments take 1 GiB; then large blocks of different sizes, which require a flush
    rows = ("100", "60000", "200", "40000", "66000")
    answer = rehearse(TRAINS, "--memory", "11GiB", "--memory-overhead", "0", command=("train.py", *rows))
    measured = [json.loads(line) for line in answer.printed.splitlines() if line.startswith("[")]
    steps = answer.found["steps"]
    assert answer.status == 0
    assert answer.found["fits"]
    assert [each["allocated_bytes"] for each in steps[1:]] == [each[1] for each in measured[1:]]
    assert [each["reserved_bytes"] for each in steps] == [each[2] for each in measured]
    flushes = [each[3] for each in measured]
    assert [each["flushes"] for each in steps] == [now - before for before, now in pairwise([0, *flushes])]
    assert flushes[-1] > 0
    assert [each[4:] for each in measured] == [[0, [7]]] * len(rows)


@pytest.mark.smoke
def test_oom_is_reported_with_its_place_and_the_contents_of_memory(rehearse: Rehearse) -> None:
    answer = rehearse(TRAINS, "--memory", "6GiB", "--memory-overhead", "0", command=("train.py", "100", "90000"))
    error = answer.found["out_of_memory"]
    assert (answer.status, answer.found["fits"], error["step"]) == (1, False, 2)
    assert error["asked_bytes"] == 704 * 2 * 2**20  # 90,000 rows, rounded to the allocator's blocks
    assert error["file"].endswith("train.py")
    assert "model(torch.randn" in TRAINS.splitlines()[error["line"] - 1]
    assert error["source"] == TRAINS.splitlines()[error["line"] - 1].strip()
    assert "F.linear" in error["operation"]
    assert "Traceback" not in answer.printed
    held = error["held_bytes"]
    assert (held["parameters"], held["optimizer"]) == (WEIGHTS, 2 * WEIGHTS)
    assert held["activations and other"] >= 90000 * 4096 * 4
    assert sum(held.values()) == error["allocated_bytes"]
    assert error["free_bytes"] + error["reserved_bytes"] <= 6 * GIB == error["allowed_bytes"]


def test_sharded_model_runs_as_one_of_the_requested_ranks_with_any_launcher(rehearse: Rehearse) -> None:
    answer = rehearse(SHARDED, "--rank", "3", command=("torchrun", "--nproc_per_node", "4", "train.py", "8"))
    weights = 4 * 8192 * 8192 * 4
    assert answer.status == 0
    assert f"ranks {[3] * 4} allocated {weights // 4}" in answer.printed
    whole = weights // 4  # of one layer
    assert weights // 4 + 2 * whole <= answer.found["steps"][1]["allocated_bytes"] < 2 * weights


ONE_STEP = """
    import os, sys, torch, torch.distributed as dist

    model = torch.nn.Linear(1024, 1024).cuda()
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    print("ranks", os.environ.get("WORLD_SIZE"), "cards", torch.cuda.device_count(), sys.path.count(os.getcwd()))
"""
ACCELERATE = """
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    num_machines: 1
    num_processes: 4
    mixed_precision: 'no'
"""


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ((), 1),
        (("torchrun",), 4),
        (("python", "-m", "torch.distributed.run", "--nproc-per", "4"), 4),
        (("accelerate", "launch", "--config_file", "config.yaml"), 4),
        (("accelerate", "launch", "--num_processes", "4"), 4),
        (("accelerate", "launch", "--num_processes", "1"), 1),
    ],
    ids=["none", "variable", "module", "file", "option", "single rank"],
)
def test_launcher_determines_the_number_of_ranks_and_an_earlier_launch_does_not(
    launcher: tuple[str, ...], ranks: int, rehearse: Rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(dedent(ACCELERATE))
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "PET_NPROC_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    answer = rehearse(ONE_STEP, command=(*launcher, "train.py"))
    assert (answer.status, answer.found["ranks"]) == (0, ranks), answer.printed
    assert answer.found["overhead_bytes"] == (int(1.3 * GIB) if ranks == 1 else 3 * GIB)
    assert f"ranks {ranks if ranks > 1 else None} cards {ranks} 1\n" in answer.printed


def test_gathered_parameters_are_counted_with_their_shards(rehearse: Rehearse) -> None:
    answer = rehearse(SHARDED, "--ranks", "8", "--memory", "10GiB", command=("train.py", "100000"))
    held = answer.found["out_of_memory"]["held_bytes"]
    shards, layer = 4 * 8192 * 8192 * 4 // 8, 8192 * 8192 * 4
    assert held["parameters"] > shards
    assert (held["parameters"] - shards) % layer == 0
    before_the_update = SHARDED.replace("optimizer.step()", "torch.empty(2**40, device='cuda')", 1)
    answer = rehearse(before_the_update, "--ranks", "8", command=("train.py", "8"))
    held = answer.found["out_of_memory"]["held_bytes"]
    assert (held["parameters"], held["gradients"]) == (shards, shards)


def test_single_step_is_reported_with_the_memory_of_a_second_step(rehearse: Rehearse) -> None:
    sizes = ("--memory", "11GiB", "--memory-overhead", "0")
    alone = rehearse(TRAINS, *sizes, command=("train.py", "60000")).found
    first, second = rehearse(TRAINS, *sizes, command=("train.py", "60000", "60000")).found["steps"]
    state = alone["peak_by_kind"]["optimizer"]
    assert state == pytest.approx(2 * WEIGHTS, rel=0.01)
    needs = first["allocated_bytes"] + state
    assert second["allocated_bytes"] == pytest.approx(needs, rel=1e-3)
    assert alone["verdict"].endswith(f"; a second step would need about {needs / GIB:.2f} GiB allocated")
    small = f"{(first['reserved_bytes'] + needs) // 2}B"
    answer = rehearse(TRAINS, "--memory", small, "--memory-overhead", "0", command=("train.py", "60000"))
    assert (answer.status, answer.found["fits"]) == (2, None)
    assert f"another would need about {needs / GIB:.2f} of" in answer.found["verdict"]


@pytest.mark.parametrize("update", ["w -= w.grad", "pass"], ids=["manual update", "inference"])
def test_script_without_an_optimizer_gets_a_peak_and_a_verdict(rehearse: Rehearse, update: str) -> None:
    script = f"""
        import sys, torch

        w = torch.zeros(8192, 8192, device="cuda", requires_grad=True)
        rows = torch.zeros(int(sys.argv[1]), 8192, device="cuda")
        (rows @ w).sum().backward()
        with torch.no_grad():
            {update}
        torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8, device="cuda"), torch.zeros(3, 3, 1, 1, device="cuda"))
    """
    answer = rehearse(script, command=("train.py", "8"), json_format=False)
    assert (answer.status, answer.found.splitlines()[0]) == (
        0,
        "fits: 0.53 of 77.8 GiB reserved at most; no optimizer took a step",
    )
    assert "cuDNN's workspaces for convolutions are not counted" in answer.found
    answer = rehearse(script, command=("train.py", "4000000"))
    assert (answer.status, answer.found["verdict"].startswith("does not fit: out of memory, ")) == (1, True)


def test_step_taken_by_some_optimizers_is_not_complete_at_oom(rehearse: Rehearse) -> None:
    script = """
        import sys, torch

        nets = [torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)]).cuda() for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters()) for net in nets]
        for iteration in 1, 2, 3:
            for optimizer, net in zip(optimizers, nets):
                rows = 2**20 if iteration == int(sys.argv[1]) and net is nets[1] else 8
                optimizer.step(lambda: net(torch.zeros(rows, 1024, device="cuda")).sum().backward())
    """
    sizes = ("--memory", "10GiB", "--memory-overhead", "0")
    for iteration in 1, 2:
        answer = rehearse(script, *sizes, command=("train.py", str(iteration)))
        error = answer.found["out_of_memory"]
        assert (answer.status, error["step"], len(answer.found["steps"])) == (1, iteration, iteration - 1)
        assert error["held_bytes"]["activations and other"] >= 2**20 * 1024 * 4


def test_steps_end_even_if_each_trains_a_new_model(rehearse: Rehearse) -> None:
    script = """
        import torch

        for _ in range(9):
            model = torch.nn.Linear(1024, 1024).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            model(torch.zeros(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            del optimizer
    """
    assert len(rehearse(script, "--steps", "3").found["steps"]) == 3


def test_script_that_raises_another_error_after_oom_does_not_fit(rehearse: Rehearse) -> None:
    script = """
        import torch

        try:
            torch.empty(2**40, device="cuda")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("training has failed") CAUSE
    """
    answer = rehearse(script.replace("CAUSE", ""))
    assert (answer.status, answer.found["fits"]) == (1, False)
    goes_on = """train.step()
            raise KeyError("another")"""
    model = "train = torch.optim.SGD([torch.ones(8, device='cuda', requires_grad=True)])"
    answer = rehearse(
        script.replace('raise RuntimeError("training has failed") CAUSE', goes_on).replace(
            "try:", model + "\n        try:"
        )
    )
    assert answer.status == 2
    assert "failed in step 2 at train.py:9: KeyError: 'another'" in answer.found["verdict"]
    answer = rehearse(script.replace("CAUSE", "from None"), status=2)
    assert answer.found["verdict"].endswith("training has failed; it ran out of memory before (see below)")


def test_ddp_buckets_and_a_loss_outside_modules_are_counted_in_every_step(rehearse: Rehearse) -> None:
    script = """
        import torch, torch.distributed as dist
        import torch.nn.functional as F

        dist.init_process_group("nccl")
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters())
        for rows in 100, 100, 20000:
            logits = model(torch.randn(rows, 4096, device="cuda"))
            loss = F.cross_entropy(logits, torch.zeros(rows, dtype=torch.long, device="cuda"))
            if rows > 100:
                torch.empty(2**40, device="cuda")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    error = rehearse(script, "--ranks", "2").found["out_of_memory"]
    held = error["held_bytes"]
    assert error["step"] == 3
    buckets, of_layers, of_loss = WEIGHTS, 4 * 20000 * 4096 * 4, 20000 * 4096 * 4
    assert held["activations and other"] >= buckets + of_layers + of_loss


@pytest.mark.parametrize("pinned", [True, False])
def test_offloaded_tensors_take_no_host_memory(rehearse: Rehearse, pinned: bool) -> None:
    script = f"""
        import resource, torch
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        torch.distributed.init_process_group("nccl")
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(8)))
        for layer in [*model, model]:
            fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory={pinned}))
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            for _ in range(2):
                model(torch.zeros(1, 8192, device="cuda")).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert torch.nn.Linear(16384, 32768).to(torch.bfloat16).weight.dtype is torch.bfloat16
        assert torch.zeros(4).pin_memory(device="cuda").is_pinned()
        print("held", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
    """
    answer = rehearse(script, "--ranks", "2")
    assert (answer.status, len(answer.found["steps"])) == (0, 2), answer.printed
    held_kib = int(re.search(r"held (\d+)", answer.printed)[1])  # type: ignore[index]
    # if written, weights, gradients and state would be 4 GiB in addition to torch's memory
    assert held_kib < 2.5 * 2**20


def test_scalar_tensors_in_nested_lists_become_tensors(rehearse: Rehearse) -> None:
    script = """
        import torch

        one, two = torch.tensor(1.0), torch.tensor(2.0)
        assert torch.tensor([one, two]).tolist() == [1.0, 2.0]
        assert torch.as_tensor(([one], (two,)), device="cuda").shape == (2, 1)
    """
    rehearse(script, json_format=False, status=0)


def test_nvml_reports_the_card(rehearse: Rehearse) -> None:
    script = """
        import ctypes, torch

        torch.zeros(1024, device="cuda")
        nvml, card, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
        assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card)) == 0
        assert nvml.nvmlDeviceGetMemoryInfo(card, memory) == 0
        free, total = torch.cuda.mem_get_info()
        assert list(memory) == [total, free, total - free]
    """
    rehearse(script, json_format=False, status=0)


def test_ddp_and_optimizers_in_the_backward_take_steps(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    script = """
        import torch, torch.distributed as dist

        dist.init_process_group("nccl")
        layers = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024))
        layers = torch.nn.SyncBatchNorm.convert_sync_batchnorm(layers)
        model = torch.nn.parallel.DistributedDataParallel(layers.cuda(), device_ids=[0])
        first, second = torch.optim.SGD(layers[0].parameters()), torch.optim.SGD(layers[1].parameters())
        for _ in range(3):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            first.step()
            second.step()
    """
    answer = rehearse(script, "--ranks", "8")
    assert [each["step"] for each in answer.found["steps"]] == [1, 2, 3]


def test_new_optimizers_take_steps_and_replayed_graphs_do_not(rehearse: Rehearse) -> None:
    script = """
        import torch

        model, rows = torch.nn.Linear(1024, 1024).cuda(), torch.zeros(8, 1024, device="cuda")

        def step():
            optimizer = torch.optim.SGD(model.parameters())
            model(rows).sum().backward()
            optimizer.step()

        def finite(loss):
            return bool(loss > 0)

        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(rows)
        for _ in range(5):
            graph.replay()
        assert finite(model(rows).sum())
    """
    assert "(3 steps)" in rehearse(script, json_format=False).found.splitlines()[0]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("raise ValueError('no such data')", "no answer: the script failed in step 1 at train.py:1: ValueError: "
         "no such data"),
        ("import os; os.write(2, b'error: no such data\\n50 %'); exit(1)", "no answer: the script failed in step 1 "
         "at train.py:1: error: no such data"),
        ("print(1)", "no answer: the script took no optimizer step, but its process allocated no GPU memory"),
        (
            "import os, torch\ntry: torch.empty(2**40, device='cuda')\nexcept RuntimeError: os.kill(os.getpid(), 9)",
            "no answer: signal 9 (Killed) ended the script in step 1 (is this machine out of memory?)",
        ),
        ("import torch.distributed as dist; dist.broadcast_object_list([None])", "no answer: rank 3 waits for objects "
         "of another rank: rehearse rank 0, or --together"),
    ],
    ids=["failed", "exits", "no training", "killed", "waits for rank 0"],
)  # fmt: skip
def test_script_without_a_step_gives_no_prediction(rehearse: Rehearse, script: str, expected: str) -> None:
    answer = rehearse(script, "--ranks", "4", "--rank", "3", json_format=False)
    assert (answer.status, answer.found.splitlines()[0]) == (2, expected)


def test_number_of_ranks_in_the_script_needs_the_option(rehearse: Rehearse) -> None:
    script = "import torch.distributed as dist; dist.init_process_group('nccl', rank=0, world_size=4)"
    assert "world_size=4: pass --ranks 4" in rehearse(script).found["verdict"]


EXITS = ONE_STEP + "    held = torch.empty(20 * 2**30, dtype=torch.uint8, device='cuda')\n"


def test_memory_of_a_script_that_ends_by_os_exit_is_counted(rehearse: Rehearse) -> None:
    answer = rehearse(EXITS + "    os._exit(int(sys.argv[1]))\n", command=("train.py", "0"))
    assert (answer.status, answer.found["fits"]) == (0, True)
    assert answer.found["rank_peaks"][0]["reserved_bytes"] >= 20 * 2**30
    answer = rehearse(EXITS + "    os._exit(int(sys.argv[1]))\n", command=("train.py", "3"))
    assert (answer.status, answer.found["fits"]) == (2, None)


def test_forked_child_that_ends_after_a_step_leaves_the_record_alone(rehearse: Rehearse) -> None:
    child = "    if (child := os.fork()) == 0:\n        sys.exit(3)\n    assert os.waitpid(child, 0)[1] == 3 << 8\n"
    answer = rehearse(EXITS + child)
    assert (answer.status, answer.found["fits"]) == (0, True), answer.printed
    assert answer.found["rank_peaks"][0]["reserved_bytes"] >= 20 * 2**30


@pytest.mark.parametrize(
    "size",
    ["torch.cuda.get_device_properties(0).total_memory // 2", "torch.cuda.mem_get_info()[1] // 2"],
)
def test_script_that_reads_the_memory_of_its_card_is_rehearsed_on_each(size: str, rehearse: Rehearse) -> None:
    script = f"{ONE_STEP}    assert sys.stdin.read() == ''\n    torch.empty({size}, dtype=torch.uint8, device='cuda')\n"
    rows = rehearse(script, "--gpu", "4090,h100").found
    assert [row["fits"] for row in rows] == [True, True]
    assert rows[0]["reserved_bytes"] < 0.6 * rows[1]["reserved_bytes"]


def test_limit_that_the_script_has_set_is_the_one_in_the_verdict(rehearse: Rehearse) -> None:
    limited = "    torch.cuda.set_per_process_memory_fraction(0.25)\n    torch.empty(2**35, device='cuda')\n"
    answer = rehearse(ONE_STEP + limited, "--memory", "41.3GiB", status=1)
    assert "of the script's limit of 10.0 GiB" in answer.found["verdict"]


def test_script_that_exits_after_a_caught_oom_has_no_verdict(rehearse: Rehearse) -> None:
    script = (
        ONE_STEP
        + """
    try:
        torch.empty(2**40, device="cuda")
    except torch.OutOfMemoryError:
        pass
    if os.fork() == 0:
        import time
        time.sleep(600)  # unless it is killed, readers of its output would wait this long
    sys.exit(0 if len(sys.argv) == 1 else "that is all")
    """
    )
    answer = rehearse(script)
    assert (answer.status, answer.found["fits"], len(answer.found["caught"])) == (2, None, 1)
    assert answer.found["verdict"].startswith(
        "no answer: memory ran out in step 2, and no step followed, but the script ended with success"
    )
    answer = rehearse(script, command=("train.py", "text"))
    assert answer.printed.endswith("that is all\n")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("print(box, file=sys.stderr)\n    sys.exit(2)", "train.py:8: No such option: --rows Try --help"),
        (
            "raise ChildFailedError('train.py', {0: ProcessFailure(0, 1, 1, '')})",
            "train.py:7: ChildFailedError: train.py FAILED",
        ),
    ],
    ids=["box", "torchrun"],
)
def test_error_drawn_in_a_box_is_shown_as_text(end: str, shown: str, rehearse: Rehearse) -> None:
    script = f"""
    import sys, torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    box = "╭── Error ──────────────╮\\n│No such option: --rows │\\n│Try --help             │\\n╰──────╯"
    torch.ones(1, device="cuda")
    {end}
    """
    answer = rehearse(script, status=2)
    assert answer.found["verdict"] == f"no answer: the script failed in step 1 at {shown}"


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, (), "only torch's own caching allocator can be rehearsed"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, (), "only torch's own caching allocator"),
        ({}, ("--rank", "1"), "there is no rank 1: the last of 1 is 0"),
        ({}, ("--memory", "1GB"), "the GPU has 0.931 GiB, of which 1.3 GiB are not for tensors"),
        (
            {},
            ("--memory", "80"),
            "memory: '80' is neither an amount of memory nor a fraction; allowed",
        ),
        ({}, ("--gpu", "h1000"), "unknown GPU 'h1000'"),
        ({}, ("--ranks", "0"), "argument --ranks: 0 is not a whole number from 1"),
        ({}, ("--ranks", "1,x"), "x is not a whole number from 1"),
        ({}, ("--steps", "-1"), "argument --steps: -1 is not a whole number from 0"),
        ({}, ("--devices", "17"), "argument --devices: invalid choice: 17"),
        ({}, ("--fixed", "12=512"), "argument --fixed: 12=512 is not a line and a number, as in train.py:12=512"),
        ({}, ("--", "deepspeed", "--num_gpus", "8", "train.py"), "cannot be followed: rehearse train.py "),
        ({}, ("--jobs", "2"), "--jobs needs --cases"),
        ({}, ("--update-peaks",), "--update-peaks needs --cases"),
        ({}, ("--cases", "fits.toml", "--gpu", "4090"), "--cases reads gpu from its file"),
        ({}, ("--cases", "fits.toml"), "--cases reads the command from its file"),
    ],
)
def test_invalid_options_are_refused_before_the_script_runs(
    variables: dict[str, str], words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    skip_without_null_device()
    (tmp_path / "train.py").write_text("raise ValueError")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main([*words, "--", str(tmp_path / "train.py")])
    assert left.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_host_values_are_read_and_values_computed_on_the_card_are_guessed_and_reported(
    rehearse: Rehearse,
) -> None:
    script = """
        import torch

        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            lengths = torch.tensor([3, 37], device="cuda")
            assert (lengths[1].item(), lengths.tolist()) == (37, [3, 37])
            assert (torch.arange(100) < 7).cuda().nonzero().shape == (7, 1)
            experts = torch.randint(0, 8, (4096,), device="cuda")
            chosen = (experts != 3).nonzero()  # guessed
            assert chosen.shape == (4096, 1)
            rows = max(1, experts.max().item())  # guessed
            del lengths, chosen  # a new tensor at this address must not get the old values
            ones = torch.empty(4096, dtype=torch.long, device="cuda")
            assert torch.bincount(ones, minlength=8).tolist() == [0] * 8  # guessed
            tokens = torch.full((2**22,), 0x7F8000007F800000).cuda()
            del tokens  # as floats these are infinite
            assert torch.empty(2**23, device="cuda").cpu().sum() == 0
            out = model(torch.zeros(rows, 1024, device="cuda"))
            out.register_hook(lambda gradient: gradient * (not torch.isnan(gradient).any()))  # guessed
            out[out > 0].sum().backward()  # guessed
            optimizer.step()
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer.load_state_dict(torch.load("state.pt", map_location="cuda"))
        optimizer.step()
    """
    answer = rehearse(script, status=0)
    assert sorted(_lines(answer.found["places_read"])) == _marked(script)


def test_values_changed_or_made_unique_on_the_card_are_guessed(rehearse: Rehearse) -> None:
    script = """
        import torch

        def size(value):
            return value

        left, kept = torch.tensor(3).cuda(), (torch.arange(100) < 7).cuda()
        same, repeated = torch.tensor([5, 6]).cuda(), torch.tensor([1, 1, 2]).cuda()
        assert same[1:].item() == 6
        assert repeated.unique().tolist() == [1, 2]
        kept[torch.arange(10, device="cuda")] = True
        same[1] = 9
        repeated.add_(1)
        while left.item() > 0:
            left -= 1
        print(kept.nonzero().shape[0])
        print(size(same.tolist()), size(same[1].item()))
        repeated.remainder_(7)
        repeated.unique()  # guessed
        padded, ids = torch.zeros(2, 4, dtype=torch.long).cuda(), torch.tensor([[1, 2], [3, 4]])
        assert ids.cuda().clone().tolist() == ids.tolist()
        padded[:, :2].copy_(ids)
        print(size(padded.tolist()))  # guessed
        print(size(ids.cuda()[:, 1].clone().tolist()))  # guessed
        with torch.inference_mode():
            kept = torch.tensor([True, False]).cuda()
            kept.logical_not_()
            kept.nonzero()  # guessed
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert answer.printed.startswith("10\n[5, 9] 9\n")
    assert _lines(answer.found["places_read"]) == _marked(script)


def test_values_computed_on_the_card_are_guessed_on_the_host_too(rehearse: Rehearse) -> None:
    script = """
        import torch

        def size(value):
            return value

        rows, shown = torch.randint(1, 9, (8, 1024), device="cuda"), []
        shown += rows.sum(1).tolist()  # guessed
        shown.append(int(rows.sum(1).cpu().sum()))  # guessed
        shown.append((torch.rand(64, device="cuda") < 8).cpu().sum().item())  # guessed
        for _ in range(2):  # the second reuses the address of a number
            scores = torch.rand(64).cuda()
            shown.append((scores > -1).to("cpu").sum().item())  # guessed
            del scores
        shown.append(int(torch.ones(8, 8).cuda().sum()))  # guessed
        with torch.inference_mode():
            rows = torch.full((4,), 8).cuda()
            rows *= 2
            size(rows.tolist())  # guessed
        lengths = torch.tensor([3, 4]).cuda()
        rows = torch.tensor([5, 6, 7]).cuda().clone()
        del rows
        shown.append(torch.randint(1, 9, (8,), device="cuda").sum().item())  # guessed
        shown += torch.repeat_interleave(torch.zeros(2, 5, device="cuda"), lengths, dim=0).shape
        for create in torch.tensor, torch.as_tensor:
            assert torch.topk(input=create(data=[5.0, 6.0]).cuda(), k=1).indices.shape == (1,)  # guessed
        assert not torch.isnan(input=torch.ones(2, device="cuda")).any()  # guessed
        print(size(shown), lengths.cpu().tolist(), torch.tensor([True, False]).cuda().tolist(), flush=True)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP))
    assert answer.printed.startswith(f"{[0] * 8 + [0, 64, 64, 64, 0, 0, 7, 5]} [3, 4] [True, False]\n"), answer.printed
    assert _lines(answer.found["places_read"]) == _marked(script)


def test_integers_that_the_user_states_are_read_and_no_longer_guessed(rehearse: Rehearse) -> None:
    script = """
        import torch

        labels, answers = torch.randint(0, 10, (64,), device="cuda"), torch.zeros(64, 10, device="cuda")
        rows = labels.max().item()  # guessed
        columns = int(answers.sum())  # guessed
        kinds = labels.unique().numel()  # guessed
        first, *_ = answers.argmax(-1).tolist()  # guessed
        print(rows, columns, kinds, first, flush=True)
        torch.zeros(rows, 2**20, device="cuda")
    """
    script = dedent(script) + dedent(ONE_STEP)
    guessed, at = rehearse(script), _marked(script)
    assert guessed.printed.startswith("0 0 1 0\n")
    assert _lines(guessed.found["places_read"])[:4] == at
    assert guessed.found["guesses"] == [f"train.py:{at[0]}"]
    stated = [f"--fixed=train.py:{line}={number}" for line, number in zip(at, (512, 3, 7, 9), strict=True)]
    fixed = rehearse(script, *stated)
    assert fixed.printed.startswith("512 3 7 9\n")
    assert fixed.found["guesses"] == []
    assert fixed.found["rank_peaks"][0]["allocated_bytes"] >= 2**31 > guessed.found["rank_peaks"][0]["allocated_bytes"]
    assert "guessed" not in fixed.found["verdict"]
    text = rehearse(script, *stated[1:], "--fixed", "train.py:1=9", json_format=False).found
    assert "--fixed train.py:1=N has no effect: this line reads no unknown value" in text
    assert text.count("has no effect") == 1
    assert f"with random values at train.py:{at[0]}: " in text


PRINTED = """
    import torch

    def has_overflow():  # as in DeepSpeed's ZeRO
        return bool(torch.randint(2, (1,), dtype=torch.uint8, device="cuda").byte().to("cuda")[0].item())

    has_overflow()
    answers = torch.zeros(64, 10, device="cuda")
    print(answers, answers.argmax(-1), answers > 0, f"{answers.argmax()} {torch.ones(()).cuda() + 1:.3f}")
"""
DOCUMENT_MASK = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    documents = (torch.arange(512) // 100).cuda()

    def same_document(batch, head, query, key):
        return (query >= key) & (documents[query] == documents[key])

    mask = create_block_mask(same_document, 1, None, 512, 512, device="cuda")
    assert mask.kv_indices.shape == (1, 1, 4, 4)
"""
COMPILED_MASK = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    positions = torch.arange(512, device="cuda")
    create = torch.compile(create_block_mask, fullgraph=True)
    create(lambda batch, head, query, key: positions[query] >= positions[key], 1, None, 512, 512, device="cuda")
"""
"""Dynamo finds out once, in a torch function mode, which function of torch each operator calls."""


@pytest.mark.parametrize(
    "script", [PRINTED, DOCUMENT_MASK, COMPILED_MASK], ids=["printed or checked", "document mask", "compiled mask"]
)
def test_values_that_are_known_or_decide_nothing_are_not_reported(rehearse: Rehearse, script: str) -> None:
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert answer.found["guesses"] == []


@pytest.mark.parametrize(
    ("body", "options", "status", "expected"),
    [
        ("kept = torch.ones(2**40, device='cuda')", (), 1, "guessed values were read at train.py:4: with others"),
        (
            "break",
            ("--timeout", "20"),
            2,
            "the last guessed value was read at train.py:4 (to state it",
        ),
    ],
    ids=["out of memory", "timeout"],
)
def test_read_before_memory_or_time_ran_out_is_named(
    rehearse: Rehearse, body: str, options: tuple[str, ...], status: int, expected: str
) -> None:
    script = f"""
    import torch
    while True:
        if torch.rand(1, device="cuda").item() {"<" if options == () else ">"} 0.5:
            {body}
    """
    answer = rehearse(script, *options, json_format=False)
    assert (answer.status, expected in answer.found) == (status, True), answer.found


def test_generation_without_known_tokens_ends_at_its_limit(rehearse: Rehearse) -> None:
    script = """
        import torch

        torch.distributed.init_process_group("nccl")
        end, done = torch.tensor([2], device="cuda"), torch.zeros(4, dtype=torch.bool, device="cuda")
        for first in range(1, 8):
            done |= torch.randint(0, 9, (4,), device="cuda") == end
            if done.all():
                break
        running, second, stop = torch.ones(4, dtype=torch.long, device="cuda"), 0, None
        while second < 20:
            second += 1
            drawn = torch.isin(torch.randint(0, 9, (4,), device="cuda"), end)
            running = running & ~(torch.full((4,), second >= 7, device="cuda") | drawn)
            if running.max() == 0:
                break
        with torch.device("cuda"):
            assert torch.ones(4).is_cuda and torch.tensor([1]).is_cuda
        running = torch.tensor(1.0, device="cuda")
        torch.distributed.all_reduce(running)
        assert running.item() == 2
        if not (torch.isfinite(torch.zeros(4, device="cuda")).all() and (drawn == end).all()):
            raise ValueError("checks are true")
        print("tokens", first, second)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "2")
    assert answer.printed.startswith("tokens 7 7\n"), answer.printed


def test_generation_in_inference_mode_ends_at_its_limit(rehearse: Rehearse) -> None:
    """As transformers' `generate` ends, if a script calls it in inference mode, in which torch counts no versions."""
    script = """
        import torch

        with torch.inference_mode():
            end, length = torch.tensor([2], device="cuda"), 0
            running = torch.ones(4, dtype=torch.long, device="cuda")
            while length < 20:
                length += 1
                done = torch.full((4,), False, device="cuda") | torch.full((4,), length >= 7, device="cuda")
                done = done | torch.isin(torch.randint(0, 9, (4,), device="cuda"), end)
                running = running & ~done
                if running.max() == 0:
                    break
        print("tokens", length)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP))
    assert answer.printed.startswith("tokens 7\n"), answer.printed
    assert answer.found["guesses"] == ["train.py:12"]  # it may end earlier
    assert "guessed" not in answer.found["verdict"]


def test_counts_and_comparisons_of_host_values_are_known(rehearse: Rehearse) -> None:
    script = """
        import torch
        from transformers.trainer_pt_utils import nested_numpify

        for step in range(2):
            labels = torch.arange(40).view(4, 10)
            labels[:, step + 1:] = -100
            labels, lengths = labels.cuda(), torch.tensor([3, 5, 2]).cuda()
            assert (labels != -100).sum().item() == 4 * (step + 1)
            assert (labels[..., 1:] != -100).sum().item() == 4 * step
            assert (lengths.max().item(), torch.sum(lengths > 2).item(), int(lengths.bool().sum())) == (5, 2, 3)
            assert labels[:, 0].tolist() == labels.t()[0].cpu().tolist() == [0, 10, 20, 30]
            assert lengths[lengths > 2].shape == (2,)
            assert ((lengths > 2) & (lengths < 5)).nonzero().tolist() == [[0]]
            lengths.remainder_(7)
            range(lengths.max().item())  # guessed
            nested_numpify(lengths)  # as Trainer does, to compute metrics
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert _lines(answer.found["places_read"]) == _marked(script)


def test_arithmetic_on_integers_of_the_host_gives_sizes_and_masks(rehearse: Rehearse) -> None:
    """As vision models compute the patches of each image and the places of their tokens."""
    script = """
        import torch
        from torch.nn.functional import pad

        grids = torch.tensor([[1, 28, 28], [2, 14, 14]]).cuda()
        assert (grids.prod(-1) // 4).tolist() == [196, 98]
        assert list(range(0, ((grids != 14).sum() / 3).ceil().to(torch.int64) * 3, 3)) == [0, 3]
        patches = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        ends = pad(patches.cumsum(0, dtype=torch.int32), (1, 0))
        assert (ends[1:] - ends[:-1]).tolist() == [784, 196, 196]
        rows = torch.arange(4, device="cuda")[:, None].expand(4, 3).reshape(2, 2, 3)  # a view
        assert rows.transpose(0, 1).reshape(-1).tolist() == [0, 0, 0, 2, 2, 2, 1, 1, 1, 3, 3, 3]
        frames, ones = torch.div(patches - 4, 2, rounding_mode="floor") + 1, torch.ones(3, dtype=torch.long).cuda()
        torch.nn.functional.ctc_loss(torch.zeros(391, 3, 8, device="cuda"), torch.ones(3, 1).cuda(), frames, ones)
        assert frames.tolist() == [391, 97, 97]
        assert torch.cat([patches, 1 + patches]).tolist() == [784, 196, 196, 785, 197, 197]
        counts = torch.zeros(4, dtype=torch.long, device="cuda")
        counts[1] = 5
        counts[2:] += 2
        assert counts.tolist() == [0, 5, 2, 2] and counts.max().item() == 5
        assert counts.fill_(3).mul_(2).tolist() == [6] * 4
        counts[0] = patches.float().sum().long()
        range(counts[0].item())  # guessed
        mask = torch.arange(8, device="cuda") < torch.tensor([3, 5]).cuda()[:, None]
        assert torch.zeros(2, 8, device="cuda")[mask].shape == (8,)
        hidden = torch.zeros(2, 8, 4, device="cuda", requires_grad=True)
        assert hidden.masked_select(mask[..., None]).shape == (32,)
        images = torch.zeros(8, 4, device="cuda", requires_grad=True)
        hidden.masked_scatter(mask[..., None], images).sum().backward()
        assert images.grad.shape == (8, 4)
        range((patches + (images[0, 0] > 0)).max().item())  # guessed
        hidden.masked_select(hidden > 0)  # guessed
        images = torch.zeros(64, device="cuda", requires_grad=True)
        hidden.masked_scatter(hidden > 0, images).sum().backward()  # guessed
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert _lines(answer.found["places_read"]) == _marked(script)


CHILDREN = """
    import subprocess, sys, torch

    def train(rank):
        torch.zeros(1024, device="cuda")
        subprocess.run(["sleep", "100"], timeout=200)

    if __name__ == "__main__":
        if sys.argv[1:] == ["launcher"]:
            subprocess.run([sys.executable, "-u", "train.py", "worker"], timeout=200)
        elif sys.argv[1:] == ["worker"]:
            train(0)
        else:
            process = torch.multiprocessing.get_context("spawn").Process(target=train, args=(0,))
            process.start()
            process.join()
"""


@pytest.mark.parametrize(
    ("words", "remedy"),
    [(("launcher",), "rehearse that command instead, with --ranks: train.py worker"), ((), "a separate script")],
    ids=["a command", "multiprocessing"],
)
def test_process_that_uses_a_gpu_and_cannot_be_followed_ends_the_rehearsal(
    rehearse: Rehearse, words: tuple[str, ...], remedy: str
) -> None:
    answer = rehearse(CHILDREN, command=("train.py", *words), status=2)
    assert answer.found["verdict"].startswith(
        "no answer: the script starts processes that use a GPU, which a rehearsal"
    )
    assert remedy in answer.found["verdict"]


MANUAL = """
    import torch

    first, last = torch.nn.Linear(1024, 1024).to("cuda:0"), torch.nn.Linear(1024, 8192).to("cuda:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters()])
    last(first(torch.zeros(8, 1024, device="cuda:0")).to("cuda:1")).sum().backward()
    optimizer.step()
"""
PARALLEL = """
    import torch

    model = torch.nn.DataParallel(torch.nn.Linear(8192, 8192).cuda())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.zeros(4096, 8192, device="cuda")).sum().backward()
        optimizer.step()
"""
DEVICE_MAP = """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model", device_map="auto")
    assert set(model.hf_device_map.values()) == {0, 1}
    model(input_ids=torch.zeros(1, 64, dtype=torch.long, device="cuda")).logits.sum().backward()
"""


@pytest.mark.parametrize(
    ("script", "mib"),
    [(MANUAL, (16, 128)), (PARALLEL, (512, 256)), (DEVICE_MAP, (500, 500))],
    ids=["manual", "DataParallel", "device_map"],
)
def test_each_device_of_one_process_has_its_peaks(rehearse: Rehearse, script: str, mib: tuple[int, int]) -> None:
    if script is DEVICE_MAP:
        pytest.importorskip("accelerate")
    answer = rehearse(script, "--devices", "2", status=0)
    first, second = answer.found["after_last_step"]["devices"]
    assert (first["device"], second["device"]) == (0, 1)
    least = min(first["allocated_bytes"] / mib[0], second["allocated_bytes"] / mib[1])
    assert 2**20 <= least < 3 * 2**20
    assert f"on device {int(second['reserved_bytes'] > first['reserved_bytes'])} of 2" in answer.found["verdict"]


def test_device_that_runs_out_of_memory_is_named_and_so_is_the_option(rehearse: Rehearse) -> None:
    script = MANUAL.replace("optimizer.step()", "torch.empty(2**40, device='cuda:1')")
    text = rehearse(script, "--devices", "2", json_format=False).found
    assert text.startswith("does not fit: out of memory in step 1 on device 1, ")
    assert re.search(r"\ndevice  allocated   reserved .*\n     0 .*\n     1 ", text)
    alone = rehearse(script).found["verdict"]
    assert "invalid device ordinal" in alone
    assert "for several GPUs in one process, --devices" in alone


def test_step_of_an_optimizer_that_contains_others_counts_once(rehearse: Rehearse) -> None:
    """Like torchtitan's."""
    script = """
        import torch

        class Container(torch.optim.Optimizer):
            def __init__(self, model):
                self.parts = [torch.optim.AdamW(part.parameters()) for part in model]
                super().__init__(model.parameters(), {})

            def step(self):
                for part in self.parts:
                    part.step()

        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2))).cuda()
        optimizer = Container(model)
        for _ in range(3):
            model(torch.zeros(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    answer = rehearse(dedent(script), "--steps", "3")
    assert (answer.found["fits"], len(answer.found["steps"])) == (True, 3), answer.found["verdict"]
    assert answer.found["time"]


@pytest.mark.parametrize("new_in_each_step", [False, True])
def test_optimizers_with_the_same_weights_take_a_step_together_unless_one_replaces_the_other(
    rehearse: Rehearse, new_in_each_step: bool
) -> None:
    script = """
        import sys, torch

        model = torch.nn.Linear(4096, 4096, bias=False).cuda()
        create = lambda: [torch.optim.AdamW(model.parameters()) for _ in range(2)]
        optimizers, kept = create(), []
        for _ in range(4):
            model(torch.zeros(8, 4096, device="cuda")).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                model(torch.zeros(8, 4096, device="cuda")).sum().backward()
            if sys.argv[1:]:
                kept.append(optimizers)
                optimizers = create()
    """
    answer = rehearse(script, "--steps", "3", command=("train.py", *["new"] * new_in_each_step))
    assert (answer.found["fits"], len(answer.found["steps"])) == (True, 3), answer.found["verdict"]
    states = [2 * 4096 * 4096 * 4 * count for count in ((2, 4, 6) if new_in_each_step else (2, 2, 2))]
    for step, state in zip(answer.found["steps"], states, strict=True):
        assert 1 <= step["allocated_bytes"] / (state + 3 * 4096 * 4096 * 4) < 1.35


def test_idle_optimizer_is_reported(rehearse: Rehearse) -> None:
    script = """
        import torch

        late = torch.optim.AdamW(torch.nn.Linear(1024, 1024, device="cuda").parameters())
    """
    text = rehearse(dedent(script) + dedent(ONE_STEP), json_format=False).found
    assert text.splitlines()[0].endswith("; an optimizer took no step")


def test_script_that_python_cannot_parse_has_no_answer_on_any_number_of_ranks(rehearse: Rehearse) -> None:
    answer = rehearse("def (", "--ranks", "1,2")
    assert [row["fits"] for row in answer.found] == [None, None]
    assert "SyntaxError" in answer.found[0]["verdict"]


def test_host_values_are_known_after_a_collective_in_every_step(rehearse: Rehearse) -> None:
    script = """
        import torch, torch.distributed as dist

        dist.init_process_group("nccl")
        for _ in range(2):
            total, own = torch.tensor([1024]).cuda(), torch.tensor([7]).cuda()
            each, whole = [torch.empty_like(own) for _ in range(3)], torch.empty(3, dtype=torch.long, device="cuda")
            dist.all_reduce(total)
            dist.all_gather(each, own)
            dist.all_gather_into_tensor(whole, own.view(1, 1))  # like accelerate
            everyone = [None] * 3
            dist.all_gather_object(everyone, "told")
            print(total.item(), [int(one) for one in each], whole.tolist(), everyone, flush=True)
            del total, own, each, whole
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "3")
    assert answer.printed.count(f"3072 {[7] * 3} {[7] * 3} {['told'] * 3}\n") == 2, answer.printed
    assert answer.found["guesses"] == []


def test_tokens_are_spread_evenly_over_the_experts_of_all_ranks(rehearse: Rehearse) -> None:
    script = """
        import torch, torch.distributed as dist

        def load_balancing_loss_func(chosen):  # as transformers' models count tokens for a loss
            return torch.histc(chosen, bins=16, min=0, max=16).sum().item()

        dist.init_process_group("nccl")
        for _ in range(2):
            chosen = torch.rand(512, 16, device="cuda").softmax(-1).topk(2, sorted=False).indices.flatten()
            counts = torch.histc(chosen, bins=16, min=0, max=16)  # guessed
            assert load_balancing_loss_func(chosen) == 1024
            assert counts.tolist() == torch.bincount(chosen).tolist() == [64] * 16  # guessed
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            sizes = [each.view(4, -1).sum(1).tolist() for each in (received, counts)]
            rows = torch.empty(sum(sizes[0]), 8, device="cuda")
            dist.all_to_all_single(rows, torch.randn(1024, 8, device="cuda")[chosen.argsort()], *sizes)
            print("exchanged", len(rows), flush=True)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "4")
    assert answer.printed.count("exchanged 1024\n") == 2, answer.printed
    assert _lines(answer.found["routing"]) == _marked(script)
    skewed = script.replace("[64] * 16", "[128] * 8 + [0] * 8").replace(
        "bincount(chosen)", "bincount(chosen, minlength=16)"
    )
    skewed = dedent(skewed) + dedent(ONE_STEP)
    for rank, rows in (0, 2048), (3, 0):
        answer = rehearse(skewed, "--ranks", "4", "--rank", str(rank), "--skew", "2")
        assert answer.printed.count(f"exchanged {rows}\n") == 2, answer.printed


def _lines(places: list[str]) -> list[int]:
    """Return the lines of places in the script, without those in libraries."""
    return [int(each.rpartition(":")[2]) for each in places if each.startswith("train.py:")]


def _marked(script: str) -> list[int]:
    lines = dedent(script).splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# guessed")]


ENDS_LATE = """
    import os, signal, sys, torch

    if sys.argv[1:]:
        signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "deaf" else lambda *_: sys.exit(0))
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.step()
    parent = open(f"/proc/{os.getppid()}/stat").read().split()[3]  # of the process that imports torch
    os.kill(int(parent), signal.SIGTERM)
    signal.pause()
"""


def test_signal_ends_background_jobs_and_processes_that_ignore_it(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs
    monkeypatch.setattr("subprocess.run", partial(subprocess.run, preexec_fn=ignore_interrupts))
    for words in (), ("deaf",), ("saves",):
        answer = rehearse(ENDS_LATE, command=("train.py", *words), status=2)
        at = "" if words == ("deaf",) else r" at train\.py:\d+"
        before = r"; before that, 0\.05 of 77\.8 GiB reserved at most \(step 1\)"
        assert re.fullmatch(f"no answer: interrupted in step 3{at}{before}", answer.found["verdict"])
        assert (len(answer.found["steps"]), answer.found["fits"]) == (2, None)


def test_torch_that_cannot_be_imported_is_named(rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    shutil.copy(Path(torch.__file__).with_name("version.py"), tmp_path / "torch")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    answer = rehearse(ONE_STEP, variables={"PYTHONPATH": str(tmp_path)})
    assert (answer.status, answer.found["fits"]) == (2, None)
    assert "ImportError: libcudart is missing" in answer.found["verdict"]


def test_unwritable_report_is_an_error(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    with Path("/dev/full").open("w") as full:
        to_full = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: run(*args, **kwargs | to_full))
        answer = rehearse(ONE_STEP, status=2)
    assert answer.printed.splitlines()[-1].startswith("error: stdout: No space left on device")


def test_rehearsal_ends_after_the_requested_steps(rehearse: Rehearse) -> None:
    answer = rehearse(TRAINS, "--steps", "2", command=("train.py", "8", "8", "8"), json_format=False, status=0)
    assert "in the first 2 steps" in answer.found.splitlines()[0]
    assert answer.printed.count("[8,") == 1  # the second step ends after its optimizer step


def test_example_has_the_result_shown_on_its_page(rehearse: Rehearse) -> None:
    page = (ROOT / "docs" / "rehearsing.md").read_text()
    example = str(ROOT / "examples" / "llama_8b_fsdp2.py")
    for rows in ("1", "2"):
        sizes = ("--ranks", "8", "--memory", "80GB")
        answer = rehearse("", *sizes, command=(example, "--rows", rows), json_format=False)
        assert answer.found.splitlines()[0] in page


def test_missing_launcher_is_reported() -> None:
    end = {"allocated_bytes": 0, "reserved_bytes": 0, "flushes": 0, "error": "KeyError: 'LOCAL_RANK'", "notes": []}
    failed = RehearsalResult(10 * GIB, GIB, rank=0, ranks=1, status=1, end=end)
    assert failed.verdict().endswith("put torchrun before the script)")


def test_mask_with_one_element_on_the_host_selects_it(rehearse: Rehearse) -> None:
    script = """
        import torch

        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            keep = model(torch.randn(1, 1024, device="cuda")).mean(1).cpu() > 0.5
            model(torch.randn(1, 32768, 1024, device="cuda")[keep]).sum().backward()
            optimizer.step()
    """
    answer = rehearse(script)
    assert answer.found["rank_peaks"][0]["allocated_bytes"] > 2 * 32768 * 1024 * 4


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "limits"),
    [
        ("argmax", (), {}, (0, 40)),
        ("argmax", (0,), {}, (0, 8)),
        ("argmax", (), {"dim": 0}, (0, 8)),
        ("argsort", (), {"descending": True}, (0, 5)),
        ("argsort", (0,), {}, (0, 8)),
        ("multinomial", (2,), {"replacement": True}, (0, 5)),
    ],
)
def test_random_indices_are_below_the_size_of_their_dimension(
    name: str, args: tuple[int, ...], kwargs: dict[str, object], limits: tuple[int, int]
) -> None:
    assert _LIMITS[name](scores := torch.rand(8, 5), *args, **kwargs) == limits
    assert int(getattr(torch, name)(scores, *args, **kwargs).max()) < limits[1]
