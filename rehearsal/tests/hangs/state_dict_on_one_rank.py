import torch
from setting import RANK, batch, sgd, sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

model = sharded()
optimizer = sgd(model)
model(batch()).sum().backward()
optimizer.step()
if RANK == 0:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    torch.save(get_model_state_dict(model, options=options), "/dev/null")  # here
