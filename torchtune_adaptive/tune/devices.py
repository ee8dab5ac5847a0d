"""The device of this process: choosing it, and leaving it clean for training."""

from __future__ import annotations

import gc
import logging

import torch
from torchtune import training, utils

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings, on_gpu
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.errors import ConfigError

logger = logging.getLogger(__name__)


def device_of(settings: Settings) -> torch.device:
    """The device of this process; under torchrun, the one of its local rank."""
    try:
        device: torch.device = utils.get_device(device=settings.device)
    except (RuntimeError, AttributeError) as error:
        raise _not_offered(settings, str(error)) from error
    # without an accelerator torchtune takes the CPU for whatever was asked for
    if device.type != torch.device(settings.device).type:
        raise _not_offered(settings, f"torch found only {device.type}")
    return device


def device_named(settings: Settings) -> torch.device:
    """What the config says, whether it is here or not."""
    try:
        return torch.device(settings.device)
    except RuntimeError as error:
        raise _not_offered(settings, components.in_a_line(error)) from error


def _not_offered(settings: Settings, reason: str) -> ConfigError:
    fewer = ", or start at most one process per device" * torch.accelerator.is_available()
    return ConfigError(
        f"device is {settings.device!r}, which this machine does not have ({reason}): set device: cpu{fewer}"
    )


def dtype_of(settings: Settings, device: torch.device) -> torch.dtype:
    try:
        dtype: torch.dtype = training.get_dtype(settings.dtype, device=device)
    except RuntimeError as error:
        raise ConfigError(f"dtype is {settings.dtype!r}, but {error}; set dtype: fp32") from error
    return dtype


def prepare(settings: Settings) -> None:
    """Call before anything is built: an optimizer on the CPU wants more than torchrun's one thread."""
    if settings.fsdp_cpu_offload:
        training.set_torch_num_threads()
    limited_on_cpu = settings.adaptive.memory_limit is not None and not on_gpu(settings)
    if settings.compile and limited_on_cpu and rank() == 0:
        logger.warning("compile · no effect on a CPU with adaptive.memory_limit, which meters every operation")


def start_clean(device: torch.device) -> None:
    """Call after everything is built: what building left behind must not count as training's peak."""
    if device.type == "cpu":
        gc.collect()
    else:
        training.cleanup_before_training()
