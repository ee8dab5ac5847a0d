"""Rehearse an unmodified training script as one rank of many on GPUs that are absent: `tune-adaptive rehearse`.

`start` starts the script on a null device in a separate process. There, `run_script` prepares torch and runs it,
`fake_ranks` replaces the other ranks, `device_values` answers reads from the GPU, and `step_recorder` records each
step. `result` reads the record. The package works with any script. Of the other packages here, it needs `null_cuda`.
"""
