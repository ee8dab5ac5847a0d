"""Other kinds of sharding: replicas across nodes, tensor parallelism, quantized optimizer state."""
