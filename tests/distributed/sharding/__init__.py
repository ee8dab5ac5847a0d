"""Models that are shared out in other ways: replicas across nodes, tensor parallelism, optimizer state in few bits."""
