"""What the server that forks null ranks has imported before."""

from importlib import import_module
from unittest import mock

# torchao and torchtune ask for these as they are imported, which would initialise CUDA, and then no fork can use it
with (
    mock.patch("torch.utils._triton.has_triton", return_value=True),
    mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
):
    import_module("tests.warm")
