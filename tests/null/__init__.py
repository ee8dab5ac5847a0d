"""torch's CUDA code on a device without computation: `make test-null`."""
