"""Processes on null devices, forked from a process that used a null device from its start."""

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
from gpu_rehearsal.device import NullCudaError, build, environment

from tests import ranks as on_ranks

OnNull = Callable[..., Any]

FORKING_ON_NULL = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""The NVML check keeps forks usable, because CUDA's check would reject them; without the log level, expandable
segments log every failure.
"""


def skip_without_null_device() -> None:
    try:
        build()
    except NullCudaError as error:
        pytest.skip(str(error))


def _preload() -> None:
    on_ranks._CONTEXT.set_forkserver_preload(["tests.null.forkserver_preload"])


@contextmanager
def null_processes() -> Iterator[OnNull]:
    """Yield `on_null(function, *args)`, which runs the function in a process on a null device; with `ranks=2`, on two
    gloo ranks.
    """
    variables = {**environment(), **FORKING_ON_NULL}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _preload) as pool:

        def on_null(
            function: Callable[..., Any],
            *args: Any,
            ranks: int = 1,
            in_group: bool | None = None,
            timeout_s: float = 60,
        ) -> Any:
            in_group = ranks > 1 if in_group is None else in_group
            with mock.patch.dict(os.environ, variables):
                found = pool.submit(
                    on_ranks.run_on_ranks, ranks, function, *args, in_group=in_group, timeout_s=timeout_s
                ).result()
            return found if ranks > 1 else found[0]

        yield on_null


def on_null_device(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs in a process on a null device, or on several ranks: see `null_processes`."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(on_null: OnNull, **arguments: Any) -> None:
            on_null(_run_body, body.__module__, body.__name__, arguments, **options)

        parameters = [inspect.signature(test).parameters["on_null"], *inspect.signature(body).parameters.values()]
        test.__signature__ = inspect.Signature(parameters)
        test.__module__, test.__name__, test.__doc__, test.body = body.__module__, body.__name__, body.__doc__, body
        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).body(**arguments)
