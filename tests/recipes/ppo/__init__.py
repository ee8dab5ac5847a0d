"""PPO: beside stock, every stage, what fails in it, what it saves."""
