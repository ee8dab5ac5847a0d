"""Processes with simulated GPUs, forked from one that has imported torch there."""

import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from gpu_rehearsal.device import build, environment
from gpu_rehearsal.errors import NullCudaError

TIMEOUT_S = 240
FORKING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
"""The NVML check keeps forks usable, because CUDA's check would reject them; without the log level, expandable
segments log every failure.
"""


def skip_without_null_device() -> None:
    try:
        build()
    except NullCudaError as error:
        pytest.skip(str(error))


@cache
def _server() -> ProcessPoolExecutor:
    """Return a process whose children have simulated GPUs: it starts with the variables of a null device."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def on_null_device() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs in a process with a simulated GPU."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            skip_without_null_device()
            with mock.patch.dict(os.environ, {**environment(), **FORKING}):
                _server().submit(_run_in_fork, body.__module__, body.__name__, arguments).result(TIMEOUT_S)

        test.__signature__ = inspect.signature(body)
        test.__module__, test.__name__, test.__doc__, test.body = body.__module__, body.__name__, body.__doc__, body
        return test

    return decorate


def _run_in_fork(module: str, name: str, arguments: dict[str, Any]) -> None:
    import_module(module)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(_run_body, module, name, arguments).result()


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    signal.alarm(TIMEOUT_S // 2)  # ends this process, or the executors would wait for a body that hangs
    getattr(import_module(module), name).body(**arguments)
