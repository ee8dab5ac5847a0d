"""A training script, unchanged, as one rank of many on GPUs that are not there: `tune-adaptive rehearse`.

`command` starts it on a null device in a process of its own, where `stage` makes it that rank and `step_writer` writes
down each step; `answer` reads that. This room stands on null_cuda alone, and nothing in it knows torchtune.
"""
