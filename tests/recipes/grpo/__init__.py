"""GRPO trains the same with any number of ranks, split or recovery, and resumes."""
