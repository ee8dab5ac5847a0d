"""torch's own CUDA code, over a device that computes nothing: `make test-null`."""
