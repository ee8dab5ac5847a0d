"""Let the ranks of a rehearsal share work that is equal on all of them: imports, and decisions of DTensor."""

from __future__ import annotations

import ast
import fcntl
import gc
import hashlib
import io
import os
import pickle
import signal
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Placement

from gpu_rehearsal.processes.server import end_with_parent

_INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
_OF_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_STATELESS = "Shard", "_StridedShard", "Replicate", "Partial", "_NormPartial"
_REFUSED = 77
"""Exit status of a process whose imports cannot be shared."""


def share_imports(command: Sequence[str]) -> None:
    """Import the libraries that a script names, in a child that then continues in place of this process.

    If these use CUDA, start threads or read which rank they are, this process continues without them.
    """
    script = next((Path(each) for each in command if each.endswith(".py") and Path(each).is_file()), None)
    names = [*_imports(script, set())] if script else []
    if not names:
        return
    if child := os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child receives it, too
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == _REFUSED:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        os._exit(status if status >= 0 else 1)
    end_with_parent()
    read, get = set[Any](), os._Environ.__getitem__

    def note(environ: Any, name: Any) -> Any:
        read.add(name)
        return get(environ, name)

    os._Environ.__getitem__ = note  # type: ignore[method-assign]
    for module, attributes in names:
        with suppress(BaseException):
            found = import_module(module)
            for each in attributes:  # of modules that import lazily
                getattr(found, each, None)
    os._Environ.__getitem__ = get  # type: ignore[method-assign]
    if torch.cuda.is_initialized() or threading.active_count() > 1 or read & _OF_RANK:
        os._exit(_REFUSED)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of these objects


def _imports(script: Path, seen: set[Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of libraries that a script, or a file next to it that it imports, names at its top level."""
    seen.add(script)
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(script.read_bytes()).body:
            froms = [(node.module, [each.name for each in node.names])] if isinstance(node, ast.ImportFrom) else []
            named = [(each.name, list[str]()) for each in node.names] if isinstance(node, ast.Import) else froms
            for name, attributes in named:
                top = (name or "").partition(".")[0]
                own = next((each for each in _files(script.parent, name or "") if each.is_file()), None)
                if own and own not in seen:
                    yield from _imports(own, seen)
                elif not own and top and (spec := find_spec(top)) and (spec.origin or "").startswith(_INSTALLED):
                    yield name or "", attributes


def _files(folder: Path, name: str) -> list[Path]:
    path = folder.joinpath(*name.split("."))
    return [path.with_suffix(".py"), path / "__init__.py"]


def share_shardings(folder: Path) -> None:
    """Let a rank use how another rank has sharded the results of an operation: this depends on shapes only."""
    compute = ShardingPropagator.propagate_op_sharding_non_cached

    def propagate(self: ShardingPropagator, op_schema: OpSchema) -> OutputSharding:
        meshes: list[DeviceMesh] = []
        try:
            key = _dump((str(op_schema.op), op_schema.args_schema, op_schema.kwargs_schema), op_schema, meshes)
            shapes = [(each._layout, each.mesh_dim_names, each.device_type) for each in meshes]
            name = hashlib.sha256(key + repr(shapes).encode()).hexdigest()
        except Exception:  # noqa: BLE001  a custom class of the script may refuse in any way
            return compute(self, op_schema)
        with (folder / name).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks that need the same result wait
            file.seek(0)
            if found := file.read():
                return _Unpickler(io.BytesIO(found), op_schema, meshes).load()  # type: ignore[no-any-return]
            result, known = compute(self, op_schema), len(meshes)
            with suppress(Exception):
                found = _dump(result, op_schema, meshes)
                if len(meshes) == known:
                    file.write(found)
            return result

    ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]


def _dump(value: Any, schema: OpSchema, meshes: list[DeviceMesh]) -> bytes:
    _Pickler(file := io.BytesIO(), schema, meshes).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a mesh as its place in a list, to which it adds the mesh, so that other ranks read their own mesh."""

    def __init__(self, file: io.BytesIO, schema: OpSchema, meshes: list[DeviceMesh]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._schema, self._meshes = schema, meshes

    def persistent_id(self, value: Any) -> int | None:
        if value is self._schema.op:
            return -1
        if not isinstance(value, DeviceMesh):
            return None
        if value not in self._meshes:
            self._meshes.append(value)
        return self._meshes.index(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Placement) and type(value).__name__ not in _STATELESS:
            raise pickle.PicklingError(f"{value} may have a state")
        if type(value) is not DTensorSpec:
            return NotImplemented
        return object.__new__, (DTensorSpec,), {**vars(value), "_hash": None}  # the hash depends on the mesh


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written."""

    def __init__(self, file: io.BytesIO, schema: OpSchema, meshes: list[DeviceMesh]) -> None:
        super().__init__(file)
        self._schema, self._meshes = schema, meshes

    def persistent_load(self, at: int) -> Any:
        return self._schema.op if at < 0 else self._meshes[at]
