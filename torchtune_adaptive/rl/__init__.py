"""Reinforcement learning (PPO). The stages of an iteration generate answers, score them, and train on them."""
