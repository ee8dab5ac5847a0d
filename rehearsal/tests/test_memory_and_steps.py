"""Memory and steps of a rehearsal, compared with the script's own measurements and with arithmetic."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import Rehearse
from tests.scripts import GIB, ONE_STEP, SHARDED, TRAINS, WEIGHTS

ROOT = Path(__file__).parents[1]


@pytest.mark.smoke
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


def test_script_without_an_optimizer_gets_a_peak_and_a_verdict(rehearse: Rehearse) -> None:
    script = """
        import sys, torch

        w = torch.zeros(8192, 8192, device="cuda", requires_grad=True)
        rows = torch.zeros(int(sys.argv[1]), 8192, device="cuda")
        (rows @ w).sum().backward()
        torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8, device="cuda"), torch.zeros(3, 3, 1, 1, device="cuda"))
    """
    text = rehearse(script, command=("train.py", "8"), json_format=False, status=0).found
    assert text.startswith("fits: 0.53 of 77.8 GiB reserved at most; no optimizer took a step\n")
    assert "cuDNN's workspaces for convolutions are not counted" in text
    answer = rehearse(script, command=("train.py", "4000000"), status=1)
    assert answer.found["out_of_memory"]["step"] == 1


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
    for iteration in 1, 2:
        answer = rehearse(script, "--memory", "10GiB", command=("train.py", str(iteration)))
        error = answer.found["out_of_memory"]
        assert (answer.status, error["step"], len(answer.found["steps"])) == (1, iteration, iteration - 1)
        assert error["held_bytes"]["activations and other"] >= 2**20 * 1024 * 4


def test_buckets_and_a_loss_outside_modules_count_and_several_optimizers_take_one_step(rehearse: Rehearse) -> None:
    """Under DDP with torch's checks, which compare ranks, and with SyncBatchNorm."""
    script = """
        import torch, torch.distributed as dist
        import torch.nn.functional as F

        dist.init_process_group("nccl")
        layers = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)])
        layers = torch.nn.Sequential(*layers, torch.nn.SyncBatchNorm(4096)).cuda()
        model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[0])
        optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
        for rows in 100, 100, 20000:
            logits = model(torch.randn(rows, 4096, device="cuda"))
            loss = F.cross_entropy(logits, torch.zeros(rows, dtype=torch.long, device="cuda"))
            if rows > 100:
                torch.empty(2**40, device="cuda")
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    """
    answer = rehearse(script, "--ranks", "8", variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    error = answer.found["out_of_memory"]
    assert (error["step"], len(answer.found["steps"])) == (3, 2), answer.printed
    buckets, of_layers, of_loss = WEIGHTS, 5 * 20000 * 4096 * 4, 20000 * 4096 * 4
    assert error["held_bytes"]["activations and other"] >= buckets + of_layers + of_loss


def test_new_models_and_optimizers_take_steps_and_replayed_graphs_do_not(rehearse: Rehearse) -> None:
    script = """
        import torch

        rows = torch.zeros(8, 1024, device="cuda")
        for step in range(4):
            if step != 2:
                model = torch.nn.Linear(1024, 1024).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            model(rows).sum().backward()
            optimizer.step()
            del optimizer
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(rows)
        for _ in range(5):
            graph.replay()
        assert model(rows).sum() > 0
    """
    assert len(rehearse(script, status=0).found["steps"]) == 4


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


def test_memory_of_a_script_that_ends_by_os_exit_is_counted_and_forked_children_are_not(rehearse: Rehearse) -> None:
    script = f"""
    {ONE_STEP.strip()}
    held = torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
    if (child := os.fork()) == 0:
        sys.exit(3)
    assert os.waitpid(child, 0)[1] == 3 << 8
    os._exit(int(sys.argv[1]))
    """
    answer = rehearse(script, command=("train.py", "0"), status=0)
    assert answer.found["fits"]
    assert answer.found["rank_peaks"][0]["reserved_bytes"] >= 20 * 2**30
    assert rehearse(script, command=("train.py", "3"), status=2).found["fits"] is None


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
    answer = rehearse(script, "--steps", "3")
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


def test_gradients_are_added_in_place_as_in_a_run(rehearse: Rehearse) -> None:
    script = """
        import torch

        for rows in 8, 2**15:  # gradients whose values a rehearsal could compute, and large ones
            x = torch.zeros(rows, 1024, device="cuda", requires_grad=True)
            y = 2 * x
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            (y[0].sum() + y[1].sum() + y[2].sum()).backward()
            print(torch.cuda.memory_stats()["allocation.all.allocated"] - before, flush=True)
    """
    assert rehearse(script).printed.startswith("10\n10\n")  # without a rehearsal, torch prints the same


def test_optimizer_that_takes_no_step_is_reported_and_no_answer_if_it_may_still_take_one(rehearse: Rehearse) -> None:
    script = """
        import torch

        first, second = (torch.nn.Linear(256, 256, device="cuda") for _ in range(2))
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (first, second)]
        for step in range(101):
            second(first(torch.randn(64, 256, device="cuda"))).sum().backward()
            optimizers[0].step()
    """
    assert rehearse(script, "--steps", "2", status=2).found["fits"] is None
    for steps in "0", "100":  # after so many, it is not used
        whole = rehearse(script, "--steps", steps, status=0).found
        assert whole["verdict"].endswith("; an optimizer took no step")


@pytest.mark.smoke
def test_rehearsal_ends_after_the_requested_steps(rehearse: Rehearse) -> None:
    answer = rehearse(TRAINS, "--steps", "2", command=("train.py", "8", "8", "8"), json_format=False, status=0)
    assert "in the first 2 steps" in answer.found.splitlines()[0]
    assert answer.printed.count("[8,") == 1  # the second step ends after its optimizer step


def test_script_that_reads_the_memory_of_its_card_is_rehearsed_on_each(rehearse: Rehearse) -> None:
    script = f"""
    {ONE_STEP.strip()}
    assert sys.stdin.read() == ""
    sizes = torch.cuda.get_device_properties(0).total_memory, torch.cuda.mem_get_info()[1]
    held = [torch.empty(size // 3, dtype=torch.uint8, device="cuda") for size in sizes]
    """
    small, large = rehearse(script, "--gpu", "4090,h100").found
    assert (small["fits"], large["fits"]) == (True, True)
    assert 0.6 * small["usable_bytes"] < small["reserved_bytes"] < 0.5 * large["reserved_bytes"]


def test_limit_that_the_script_has_set_is_the_one_in_the_verdict(rehearse: Rehearse) -> None:
    limited = "    torch.cuda.set_per_process_memory_fraction(0.25)\n    torch.empty(2**35, device='cuda')\n"
    answer = rehearse(ONE_STEP + limited, "--memory", "41.3GiB", status=1)
    assert "of the script's limit of 10.0 GiB" in answer.found["verdict"]


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


@pytest.mark.smoke("manual")
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


PRELUDE = """
    import torch

    layer = torch.nn.Linear(256, 256, device="cuda")
    sparse = torch.eye(256).to_sparse().cuda()
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        x = layer(torch.randn(64, 256, device="cuda"))
"""

UPDATE = """
        x.sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "line", ["x = torch.fft.fft(x).real", "torch.linalg.eigh(x.detach().T @ x.detach())", "sparse @ x.T.detach()"]
)
def test_memory_that_is_not_counted_has_a_warning(line: str, rehearse: Rehearse) -> None:
    answer = rehearse(f"{PRELUDE}        {line}{UPDATE}", status=0)
    assert "; not all memory is counted (see below)" in answer.found["verdict"]
    notes = answer.found["after_last_step"]["notes"]
    assert any("workspaces of cuFFT, cuSOLVER and cuSPARSE" in note for note in notes)


def test_example_has_the_result_shown_on_its_page(rehearse: Rehearse) -> None:
    page = (ROOT / "docs" / "rehearsing.md").read_text()
    example = str(ROOT / "examples" / "llama_8b_fsdp2.py")
    for rows in ("1", "2"):
        sizes = ("--ranks", "8", "--memory", "80GB")
        answer = rehearse("", *sizes, command=(example, "--rows", rows), json_format=False)
        assert answer.found.splitlines()[0] in page
