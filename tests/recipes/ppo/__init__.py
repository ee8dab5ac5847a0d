"""PPO: parity with stock, all stages, failures in them, checkpoints."""
