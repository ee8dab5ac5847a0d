"""Reinforcement learning (PPO, GRPO): what an iteration is made of, its stages, models, checkpoints and figures."""
