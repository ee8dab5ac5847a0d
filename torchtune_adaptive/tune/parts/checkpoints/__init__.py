"""Checkpoints that cannot be lost: complete or absent, found again by themselves.

Nothing is handed on here: who only looks at what is there (folders, manifest) does not have to wait for torch.
"""
