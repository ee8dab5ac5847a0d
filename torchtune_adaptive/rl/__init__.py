"""Reinforcement learning (PPO, GRPO): rollouts, stages of an iteration, models, checkpoints and metrics."""
