"""Record one step with torch's execution trace, and add up its work: FLOPs, bytes and collectives.

The trace contains an operation several times if it is composite, or if a tensor subclass or a dispatch mode handles it.
Only the innermost entry is counted, which has the shapes of this rank.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpu_rehearsal.report.step_time import BF16, FP8, FP32, HOST, MEMORY, TF32, Operation, Transfer, Work
from gpu_rehearsal.settings import ONE_MACHINE

_RATES = {
    "c10::BFloat16": BF16, "c10::Half": BF16, "c10::Float8_e4m3fn": FP8, "c10::Float8_e5m2": FP8, "signed char": FP8,
}  # fmt: skip
_FIRST_MATRIX = {
    "mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1, "_addmm_activation": 1, "_scaled_mm": 0,
    "_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0,
}  # fmt: skip
_ATTENTION = re.compile(r"_scaled_dot_product_\w+_attention\w*|_?(flash|efficient|cudnn)_att\w+")
_CONVOLUTIONS = "convolution", "convolution_backward"
_NO_WORK = re.compile(r"(new_)?empty\w*|resize_|set_|record_\w+|_unsafe_view|wait_tensor|detach_|barrier")
_READS_WHAT_IT_WRITES = {"embedding", "gather", "index_select", "index", "take", "nll_loss_forward"}
"""Operations that read only some rows of their first argument, as many as they write."""
_ONLY_WRITES = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "random_", "normal_", "uniform_"}
_COLLECTIVE = re.compile(
    r"(?P<whole>broadcast|scatter|send|recv)|all_?to_?all|\w*gather|(?P<twice>all_?reduce)|\w*reduce_scatter"
)
_SHARE_SAMPLES = re.compile(r"mesh_(tp|cp|sp|pp|tensor|context|pipeline)\w*")
"""Descriptions of process groups whose ranks share samples."""
_NODE = re.compile(r'"id": (\d+), "name": "(.*)", "ctrl_deps": (\d+)')
_SCHEMA = re.compile(r'"op_schema", "type": "string", "value": "([^"]*)"')
_RECORDED_BY_AUTOGRAD = re.compile(r'"seq_id", "type": "int64", "value": \d')
_Items = list[Operation | Transfer]


class Recorder:
    """Records the operations that run between `start` and `stop`."""

    def __init__(self) -> None:
        self._file: Any = None
        self._untraced: Counter[Operation | Transfer] = Counter()
        """Work that the trace does not contain: kernels of Triton and DDP's all-reduces."""
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Start recording."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._untraced.clear()
        torch._C._profiler._add_execution_trace_observer(f"/proc/self/fd/{self._file.fileno()}")
        torch._C._profiler._enable_execution_trace_observer()
        launches = self._launches

        class Launch:
            """Replaces torch's `_RecordFunctionFast`, by which compiled code reports its kernels to the profiler."""

            def __init__(self, name: str, values: Iterable[Any] = (), keyword_values: Any = None) -> None:
                if not name.startswith("##"):
                    launches(values, float((keyword_values or {}).get("kernel_flop") or 0))

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        self._replace(torch._C._profiler, "_RecordFunctionFast", Launch)
        self._replace(torch.autograd.profiler, "_is_profiler_enabled", True)
        if (jit := sys.modules.get("triton.runtime.jit")) is not None:
            run = jit.JITFunction.run

            def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
                launches((*args, *kwargs.values()), 0)
                return run(kernel, *args, **kwargs)

            self._replace(jit.JITFunction, "run", launched)

    def stop(self) -> Work:
        """Stop recording; return the work since `start`, or none if the trace could not be written."""
        torch._C._profiler._disable_execution_trace_observer()
        torch._C._profiler._remove_execution_trace_observer()
        while self._replaced:
            setattr(*self._replaced.pop())
        with self._file as file:
            self._file = None
            file.seek(-min(100, file.seek(0, os.SEEK_END)), os.SEEK_END)
            if b"finish_ts" not in file.read():  # which ends a trace
                print("rehearse: no time is estimated, because a file in TMPDIR is incomplete: free space there")
                return Work([], [], 0, 0)
            file.seek(0)
            return read((line.decode(errors="replace") for line in file), self._untraced)

    def add_bucket(self, size: int, ranks: Sequence[int]) -> None:
        """Count a bucket of DDP, whose all-reduce a rehearsal replaces."""
        if self._file is not None:  # a step is recorded
            share = 2 * (len(ranks) - 1) / len(ranks)
            self._untraced[Transfer(size, share, len(ranks), _on_this_machine(ranks), hidden=True)] += 1

    def _launches(self, values: Iterable[Any], flops: float) -> None:
        size = sum(each.nbytes for each in values if isinstance(each, torch.Tensor) and each.is_cuda)
        self._untraced[Operation(BF16 if flops else MEMORY, flops, size)] += 1

    def _replace(self, where: Any, name: str, value: Any) -> None:
        self._replaced.append((where, name, getattr(where, name)))
        setattr(where, name, value)


RECORDER = Recorder()


def read(lines: Iterable[str], untraced: Counter[Operation | Transfer] | None = None) -> Work:
    """Return the work in a trace. The trace lists inner operations before the operation that calls them."""
    trace = _Trace()
    if torch.distributed.is_initialized():
        trace.know_groups([*torch.distributed.distributed_c10d._world.pg_config_info, *_dimensions_of_all_ranks()])
    identity, name, parent, text = 0, "", 0, dict[str, str]()
    for line in lines:
        key = line.lstrip()[:4]
        if key == '"id"' and (node := _NODE.search(line)) is not None:
            identity, name, parent, text = int(node[1]), node[2], int(node[3]), {}
        elif key in ('"inp', '"out'):
            text[key] = line
        elif key == '"att' and len(text) == 2 and (schema := _SCHEMA.search(line)) is not None:
            try:
                trace.add(identity, name, parent, schema[1], text, line)
            except (ValueError, LookupError):  # a forked process may have written into the same file
                continue
    counted = trace.counted() + (untraced or Counter())
    operations = [(each, times) for each, times in counted.items() if isinstance(each, Operation)]
    collectives = [(each, times) for each, times in counted.items() if isinstance(each, Transfer)]
    return Work(operations, collectives, *trace.tokens_and_samples(), math.prod(trace.sharing.values()))


def _dimensions_of_all_ranks() -> Iterator[dict[str, Any]]:
    """Yield the dimensions of meshes that contain all ranks, because torch uses the default group for them."""
    for mesh in (each for each in gc.get_objects() if type(each) is DeviceMesh):
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
            if size == torch.distributed.get_world_size():
                yield {"pg_name": f"mesh_{name}", "pg_desc": f"mesh_{name}", "ranks": None, "group_size": size}


class _Input(NamedTuple):
    """The input of an embedding, a convolution or a compiled model."""

    node: int
    recorded: bool
    """True if autograd has recorded the operation."""
    weight: tuple[int, ...]
    """The largest counts: embeddings of rows, of single tokens, compiled models, then convolutions, the first ones."""
    tokens: int
    rows: int


class _Trace:
    def __init__(self) -> None:
        self._inner: dict[int, _Items] = defaultdict(list)
        """The work inside each operation whose end has not been read yet."""
        self._dispatched: set[int] = set()
        """Operations that a tensor subclass or a dispatch mode handles by calling others."""
        self._groups: dict[str, list[int]] = {}
        self.sharing: dict[str, int] = {}  # the number of ranks by mesh dimension, if they share samples
        self._parents: dict[int, int] = {}
        self._backward: set[int] = set()
        """Nodes of the backward pass."""
        self._inputs: dict[Any, _Input] = {}
        self._convolutions: dict[tuple[int, ...], int] = {}
        """Numbers the shapes of weights by their first use."""

    def add(self, identity: int, name: str, parent: int, schema: str, text: dict[str, str], attributes: str) -> None:
        inner = self._inner.pop(identity, [])
        space, _, short = name.partition("::")
        if name.endswith("|thread]"):
            self._inner[identity] = inner
            return
        self._parents[identity] = parent
        if name.startswith("Python"):
            self._dispatched.add(parent)
        elif name.startswith("autograd::engine"):
            self._backward.add(identity)
        elif name.startswith(("FSDP::", "FullyShardedDataParallel._")):
            inner = [each._replace(hidden=True) if isinstance(each, Transfer) else each for each in inner]
        elif name == "CompiledFunction":
            self._record_input(identity, name, True, _side(text['"inp']))
        elif identity in self._dispatched:
            self._dispatched.remove(identity)
        elif space == "c10d":
            inner = self._collective(short, text)
        elif space == "_c10d_functional":
            inner = [*(each for each in inner if isinstance(each, Operation)), *self._collective(short, text)]
        elif schema and not _NO_WORK.fullmatch(short) and (about := _about(schema)).works:
            inner = self._operation(short, about, text, inner)
            if inner and short in ("embedding", "convolution"):
                recorded = _RECORDED_BY_AUTOGRAD.search(attributes) is not None
                self._record_input(identity, short, recorded, _side(text['"inp']))
        self._inner[parent] += inner

    def counted(self) -> Counter[Operation | Transfer]:
        """Return all work, including that of operations whose end is not in the trace.

        These are the optimizer's step, inside which the trace stops, and operations that an exception ended, for
        example in a recomputation.
        """
        return Counter(itertools.chain.from_iterable(self._inner.values()))

    def tokens_and_samples(self) -> tuple[int, int]:
        """Return the tokens and samples of the largest embedding, or no tokens and those of the first convolution.

        Inputs of evaluations and reference models do not count, because autograd does not record them. Recomputations
        in the backward count only for a reentrant checkpoint, whose forward is not recorded.
        """
        inputs = self._inputs.values()
        ranked = [((each.recorded and 1 + self._in_forward(each.node), each.weight), each) for each in inputs]
        best = max((rank for rank, _ in ranked), default=None)
        found = [each for rank, each in ranked if rank == best]
        parts = math.prod(self.sharing.get(name, 1) for name in ("cp", "sp", "context"))  # each has its own tokens
        labeled = {each.rows for each in inputs if not each.tokens}  # samples, each of which has a label
        tokens = sum(each.tokens for each in found if each.tokens != each.rows or each.rows not in labeled)
        return tokens * parts, sum(each.rows for each in found)

    def _in_forward(self, node: int) -> bool:
        while node and node not in self._backward:
            node = self._parents.get(node, 0)
        return not node

    def _record_input(self, node: int, name: str, recorded: bool, given: _Side) -> None:
        first, second = map(tuple, [*given.shapes, (), ()][:2])
        if name == "embedding":
            found = (1 + min(len(second), 2), *first), math.prod(second), second[0] if second else 1
        elif name == "convolution":
            found = (0, -self._convolutions.setdefault(second, len(self._convolutions))), 0, first[0]
        else:  # of a model that is compiled with its embedding. Each of its graphs may take integers, such as labels.
            integers = [shape for shape, kind in zip(given.shapes, given.types, strict=True) if "(long" in kind]
            longest = max(integers, key=math.prod, default=[0])
            are_labels = len(longest) == 1 and any(len(each) > 2 and each[0] == longest[0] for each in given.shapes)
            found = (bool(integers), len(given.shapes)), 0 if are_labels else math.prod(longest), longest[0]
        # several embeddings of a size may look up the same tensor in a forward
        same = (len(self._backward), recorded, first, str(given.values[1][1:])) if name == "embedding" else node
        self._inputs[same] = _Input(node, recorded, *found)

    def know_groups(self, groups: Iterable[Any]) -> None:
        """Remember the process groups of this rank."""
        for group in groups:
            self._groups[group["pg_name"]] = group["ranks"] or list(range(group["group_size"]))
            if (named := _SHARE_SAMPLES.fullmatch(group["pg_desc"])) is not None:
                self.sharing[named[1]] = group["group_size"]

    def _operation(self, name: str, about: _About, text: dict[str, str], inner: _Items) -> _Items:
        multiplies = name in _FIRST_MATRIX or name in _CONVOLUTIONS or _ATTENTION.fullmatch(name) is not None
        prepared = all(isinstance(each, Operation) and each.kind == HOST for each in inner) and name != "_to_copy"
        if inner and not multiplies and not prepared and name != "embedding":
            return inner
        given, returned = _side(text['"inp']), _side(text['"out'])
        tensors, made = given.tensors(), [each for group in returned.tensors() for each in group]
        devices = {each.device for group in (*tensors, made) for each in group if each.size}
        if not any(device.startswith("cuda") for device in devices):
            return inner
        if name == "embedding":
            return inner or [Operation(MEMORY, 0, _moved(name, about, tensors, made))]
        moved = _moved(name, about, tensors, made)
        if name == "copy_" and len(devices) > 1:
            return [Operation(HOST, 0, moved // 2)]
        if not multiplies:
            return [Operation(MEMORY, 0, moved)]
        kind = given.types[_FIRST_MATRIX.get(name, 0)].removeprefix("Tensor(").removesuffix(")")
        rate = _RATES.get(kind) or (TF32 if _takes_tf32(name in _CONVOLUTIONS) else FP32)
        return [Operation(rate, _flops(name, about, given, returned), moved, flash="flash" in name)]

    def _collective(self, name: str, text: dict[str, str]) -> _Items:
        kind = _COLLECTIVE.match(name.removeprefix("_"))
        given, returned = _side(text['"inp']), _side(text['"out'])
        every = [sum(each.size for each in group) for group in (*given.tensors(), *returned.tensors())]
        sizes = sorted(size for size in every if size)
        if kind is None or not sizes:
            return []
        named = next((each for each in given.values if isinstance(each, str) and each in self._groups), None)
        ranks = self._groups[named] if named else self._group_of(sizes[-1] // sizes[0])
        share = 1.0 if kind["whole"] else (1 + bool(kind["twice"])) * (len(ranks) - 1) / len(ranks)
        return [Transfer(sizes[-1], share, len(ranks), _on_this_machine(ranks), hidden=False)]

    def _group_of(self, ratio: int) -> list[int]:
        """Return the widest group whose gathers return `ratio` times as much as they take, or else the largest."""
        groups = [ranks for ranks in self._groups.values() if len(ranks) == ratio > 1] or list(self._groups.values())
        return max(groups, key=lambda ranks: (len(ranks), ranks[-1] - ranks[0]), default=[0])


def _on_this_machine(ranks: Sequence[int]) -> int:
    here = torch.distributed.get_rank() // ONE_MACHINE if torch.distributed.is_initialized() else 0
    return max(1, sum(each // ONE_MACHINE == here for each in ranks))


class _Tensor(NamedTuple):
    identity: int
    size: int
    """Bytes of its elements. Elements that an expanded tensor repeats count once."""
    device: str


class _Side(NamedTuple):
    """The inputs or the outputs of an operation."""

    values: list[Any]
    shapes: list[Any]
    types: list[str]
    strides: list[Any]

    def tensors(self) -> list[list[_Tensor]]:
        """Return the tensors of each argument."""
        return [list(_tensors(*each)) for each in zip(self.values, self.shapes, self.strides, strict=True)]


def _side(text: str) -> _Side:
    return _Side(**json.loads(text.partition(":")[2].strip().removesuffix(",")))


def _tensors(value: Any, shape: Any, strides: Any) -> Iterator[_Tensor]:
    if not isinstance(value, list):
        return
    if len(value) == 6 and isinstance(value[5], str):
        elements = math.prod(size for size, step in zip(shape, strides, strict=True) if step)
        yield _Tensor(value[0], elements * value[4] if value[3] else 0, value[5])
    elif isinstance(shape, list) and isinstance(strides, list) and len(value) == len(shape) == len(strides):
        for each in zip(value, shape, strides, strict=True):
            yield from _tensors(*each)


class _About(NamedTuple):
    """Facts from an operation's schema."""

    arguments: list[str]
    written: list[bool]
    works: bool
    """False for views, and for operations that return no tensor."""


@functools.lru_cache(None)
def _about(schema: str) -> _About:
    arguments, _, returned = schema.partition("(")[2].rpartition(") -> ")
    each = [part for part in re.sub(r"=\[[^\]]*\]", "", arguments).split(", ") if part != "*"]
    is_view = re.search(r"Tensor\(\w+\)", returned) is not None
    works = returned == "()" or ("Tensor" in returned and not is_view)
    return _About([part.split("=")[0].split()[-1] for part in each if part], ["!" in part for part in each], works)


def _moved(name: str, about: _About, tensors: list[list[_Tensor]], made: list[_Tensor]) -> int:
    """Return the bytes that a kernel reads and writes."""
    moved, written = 0, set[int]()
    for at, (group, argument, writes) in enumerate(zip(tensors, about.arguments, about.written, strict=False)):
        size = sum(each.size for each in group)
        if writes:
            written |= {each.identity for each in group}
            moved += size
        if at == 0 and name in _READS_WHAT_IT_WRITES:
            size = min(size, sum(each.size for each in made))
        moved += 0 if writes and (argument == "out" or name in _ONLY_WRITES) else size
    return moved + sum(each.size for each in made if each.identity not in written)


def _flops(name: str, about: _About, given: _Side, returned: _Side) -> float:
    shapes, backward = given.shapes, "backward" in name
    if name in _CONVOLUTIONS:
        weight, transposed = shapes[1 + backward], given.values[6 + backward] is True
        small = shapes[backward] if transposed else shapes[0] if backward else returned.shapes[0]
        times = sum(given.values[-1][:2]) if backward else 1
        return float(2 * math.prod(small) * math.prod(weight[1:]) * times)
    if (at := _FIRST_MATRIX.get(name)) is not None:
        first, product = shapes[at], returned.shapes[0]
        groups = product[0] if len(product) == 3 and len(first) == 2 else 1  # each has a part of the inner dimension
        return float(2 * math.prod(product) * first[-1] / groups)
    at_name = {argument: at for at, argument in enumerate(about.arguments[: len(shapes)])}
    query, key = (shapes[at_name.get(each, at_name.get(each[0], 0))] for each in ("query", "key"))
    if len(query) == 3:  # concatenated samples
        longest = at_name.get("max_k", at_name.get("max_seqlen_k"))
        pairs = math.prod(query[:2]) * (key[0] if longest is None else given.values[longest])
    else:
        pairs = math.prod(query[:3]) * key[2 if "scaled_dot" in name or "cudnn" in name else 1]
    causal = at_name.get("is_causal", at_name.get("causal"))
    half = causal is not None and given.values[causal] is True
    return float(4 * pairs * query[-1] * (0.5 if half else 1) * (2.5 if backward else 1))


def _takes_tf32(convolution: bool) -> bool:
    where = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return bool(where.fp32_precision == "tf32")
