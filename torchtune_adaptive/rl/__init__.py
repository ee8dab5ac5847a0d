"""Reinforcement learning (PPO, GRPO). The stages of an iteration generate answers, score them, and train on them."""
