"""A training script, unchanged, as one rank of many on GPUs that are not there: `tune-adaptive rehearse`.

`process` starts it on a null device in a process of its own, where `run_script` makes it that rank and `step_writer`
writes down each step; `rehearsed` reads that. All this stands on `null_cuda` alone, and nothing in it knows torchtune.
"""
