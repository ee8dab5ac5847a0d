"""Reinforcement learning (PPO): what an iteration is made of, its stages, models, checkpoints and figures."""
