"""Modules that the server for null ranks imports before forking."""

from importlib import import_module
from unittest import mock

# torchao and torchtune call these at import, which would initialize CUDA and make forks unusable
with (
    mock.patch("torch.utils._triton.has_triton", return_value=True),
    mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
):
    import_module("tests.forkserver_preload")
