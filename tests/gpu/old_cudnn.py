"""With a cuDNN that is older than the one torch was built with, its attention fails at run time."""

import os

import torch


def use_torchs_attention_with_old_cudnn() -> None:
    """Disable cuDNN's attention in this process if torch was told to accept such a cuDNN."""
    if os.environ.get("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK") == "1":
        torch.backends.cuda.enable_cudnn_sdp(False)
