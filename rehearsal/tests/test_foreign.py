"""Regressions: scripts by others that once failed in rehearsals. Each runs as a user would run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_program

STEP = """
import os, torch
def step(model, rows=4):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(rows, 1024, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    return optimizer
"""


def rehearsed(folder: Path, script: str, *options: str) -> dict[str, Any]:
    """Rehearse a script that fits; return the answer, and its standard error."""
    (folder / "train.py").write_text(STEP + script)
    words = ("rehearse", "--steps", "0", "--format", "json", *options)
    ended = run_program(folder, *words, "--", "train.py")
    answer = json.loads(ended.stdout)
    assert (answer["fits"], answer["guesses"]) == (True, []), ended.stderr
    return {**answer, "errors": ended.stderr}


FEATURES = """
# kernels of Triton and CUB, and CUDA graphs
import triton, triton.language as tl
@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
x = torch.zeros(1, 1000, device="cuda")
add[(8,)](x, 1000, BLOCK=128)
x.cumsum(-1), x.topk(3), torch.randperm(100_000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
graph.replay()

# a mask without computed values selects everything
rows = torch.zeros(4096, 1024, device="cuda")
chosen = rows[torch.zeros(4096, dtype=torch.long, device="cuda") != -100]
assert chosen.shape == rows.shape

# random weights on the host take no host memory
import resource
model = torch.nn.Linear(1024, 2**20, dtype=torch.bfloat16)
torch.nn.init.trunc_normal_(model.weight)
model.cuda()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20

# autotuning does not compare kernels
from torch.nn.attention.flex_attention import flex_attention
heads = torch.zeros(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")(heads, heads, heads)
step(torch.compile(torch.nn.Linear(1024, 1024, device="cuda"), mode="max-autotune"), rows=1024)

# Inductor reads constants
scores, labels = torch.zeros(64, 10, device="cuda", requires_grad=True), torch.randint(10, (64,)).cuda() + 0
labels = torch.nn.functional.pad(labels[1:], (0, 1), value=-100)
torch.compile(torch.nn.functional.cross_entropy)(scores, labels).backward()

# numbers in nested lists become a tensor, and tensors that are sparse or have no dimensions can be reduced
one, two = torch.tensor(1.0), torch.tensor(2.0)
assert torch.tensor([one, two]).tolist() == [1.0, 2.0]
assert torch.as_tensor(([one], (two,)), device="cuda").shape == (2, 1)
sparse, single = torch.eye(64).to_sparse().cuda(), torch.ones((), device="cuda")
assert torch.sparse.sum(sparse, 0).shape == sparse.long().sum(0).shape == (64,)
assert single.argsort().shape == single.argmax().shape == ()

# TorchScript, whose third call runs a fused kernel
@torch.jit.script
def doubled(x: torch.Tensor, rows: int) -> torch.Tensor:
    return (x * 0.5 * torch.erf(x / 1.4)).sum() + torch.arange(rows, device=x.device).sum()
for _ in range(3):
    doubled(torch.ones(2**20, device="cuda", requires_grad=True), 7).backward()

# NVML and nvidia-smi report the card
import ctypes, subprocess
assert "4090" in torch.cuda.get_device_name(), torch.cuda.get_device_name()
nvml, card, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card)) == 0
assert nvml.nvmlDeviceGetMemoryInfo(card, memory) == 0
free, total = torch.cuda.mem_get_info()
assert list(memory) == [total, free, total - free]
query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
for chosen, count in ([], 2), (["-i", "0,1"], 2), (["-i", "1"], 1):
    sizes = [int(each) for each in subprocess.check_output([*query, *chosen], text=True, timeout=60).split()]
    assert sizes == [total >> 20] * count, sizes

# an optimizer may be compiled
torch.compile(step(torch.nn.Linear(1024, 1024, device="cuda")).step, backend="eager")()
"""


def test_features_of_torch_run_on_a_card_between_compiled_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert "AUTOTUNE" not in rehearsed(tmp_path, FEATURES, "--gpu", "4090", "--devices", "2")["errors"]


SPAWNED = """
def main(rank, ranks):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    assert (rank, ranks) == (1, 2)
    step(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 8, device="cuda"), device_ids=[rank]))
if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    torch.multiprocessing.spawn(main, args=(ranks,), nprocs=ranks, join=False).join()
"""


COMPILED = """
class Output(dict): pass
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(1024, 4095), torch.nn.Linear(4095, 1)
    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(x))
        return Output(hidden=hidden, loss=self.second(hidden).sum())
model = torch.compile(Model().cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.zeros(8192, 1024, device="cuda"))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_compiled_script_has_the_same_peaks_when_it_is_rehearsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    first, second = (rehearsed(tmp_path, COMPILED)["steps"] for _ in range(2))
    assert first == second
    assert len(first) == 3


def test_rank_that_the_script_would_spawn_runs_in_its_own_process(tmp_path: Path) -> None:
    rehearsed(tmp_path, SPAWNED, "--ranks", "2", "--rank", "1")


SAVED = """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
model = fully_shard(torch.nn.Linear(1024, 2**16))
assert torch.cuda.current_device() == 3
optimizer = step(model)
dcp.save({"model": model.state_dict()}, checkpoint_id="shards")
dcp.load({"model": model.state_dict()}, checkpoint_id="shards")
torch.save([model.state_dict(), torch.arange(10**6)], "whole.pt")
assert torch.load("whole.pt", weights_only=False)[1].equal(torch.arange(10**6))
"""


def test_checkpoint_takes_no_disk_space(tmp_path: Path) -> None:
    rehearsed(tmp_path, SAVED, "--ranks", "4", "--rank", "3")
    files = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(file.st_size for file in files) > 2 * 2**26
    assert sum(file.st_blocks * 512 for file in files) < 10 * 2**20


BY_NAME = """
os.environ |= {"HF_HUB_CACHE": "cache", "HF_HUB_OFFLINE": "1"}
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for name in "org/llama", "folder":
    for kind in AutoModelForCausalLM, LlamaForCausalLM:
        model = kind.from_pretrained(name, dtype="bfloat16", device_map="cuda", use_cache=False)
        assert type(model) is LlamaForCausalLM and not model.training and not model.config.use_cache
        assert model.dtype is torch.bfloat16 and model.device.type == "cuda"
        assert model.config.name_or_path == name  # TRL loads the tokenizer by it
assert kind.from_pretrained("org/llama").dtype is torch.float32
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
optimizer.step()
"""


def save_config(folder: Path) -> None:
    """Save the config in a folder and in the layout of the hub's cache."""
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 1}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, **sizes}
    cached = folder / "cache" / "models--org--llama"
    for where in folder / "folder", cached / "snapshots" / ("0" * 40):
        where.mkdir(parents=True)
        (where / "config.json").write_text(json.dumps(config))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)


def test_model_without_local_weights_is_built_from_its_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_config(tmp_path)
    note = "this machine has no weights of org/llama; the model is built from its config"
    assert note in rehearsed(tmp_path, BY_NAME)["errors"]


FUSED = """
import megatron.core.utils
import scaled_masked_softmax_cuda as fused
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction
scores = torch.zeros(4, 2**20, device="cuda", dtype=torch.bfloat16)
before = torch.cuda.memory_allocated()
softmax = fused.forward(scores, None, 1.0)
gradients = torch.zeros_like(softmax)
assert fused.backward(gradients, softmax, 1.0).data_ptr() == gradients.data_ptr()
assert torch.cuda.memory_allocated() - before == 2 * scores.nbytes
weight = torch.ones(1024, device="cuda")
normalized = FusedLayerNormAffineFunction.apply(scores.view(-1, 1024).float(), weight, weight, (1024,), 1e-5)
assert normalized.dtype is torch.float32
step(torch.nn.Linear(1024, 8, device="cuda"))
"""


def test_megatron_without_apex_takes_the_memory_of_its_kernels(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "utils.py").touch()
    assert "Apex is not installed" in rehearsed(tmp_path, FUSED)["errors"]


SAMPLED = """
class AsyncOutput:
    copy_event = torch.cuda.Event()
    def __init__(self, sampled):
        self.num_sampled_tokens_np = sampled.to("cpu", non_blocking=True, copy=True).numpy()
    def get_output(self):
        return self.num_sampled_tokens_np.tolist()
"""


def test_engine_of_vllm_runs_in_the_process_samples_a_token_per_request_and_has_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    package = tmp_path / "vllm" / "v1" / "worker" / "gpu"
    package.mkdir(parents=True)
    (package / "async_utils.py").write_text("import torch" + SAMPLED)
    (tmp_path / "vllm" / "envs.py").touch()
    script = """
import torch._inductor.config
assert torch._inductor.config.force_disable_caches
import vllm.envs
assert not torch._inductor.config.force_disable_caches
assert os.environ["VLLM_CACHE_ROOT"] != os.path.abspath("cache")
from vllm.v1.worker.gpu.async_utils import AsyncOutput
assert AsyncOutput(torch.empty(3, dtype=torch.long, device="cuda")).get_output() == [1, 1, 1]
assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
step(torch.nn.Linear(1024, 8, device="cuda"))
"""
    rehearsed(tmp_path, script)
