import tempfile

import torch.distributed as dist
from setting import RANK, batch, sgd, sharded
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

model = sharded()
optimizer = sgd(model)
for _ in range(2):
    model(batch()).sum().backward()
    optimizer.step()
folder = [tempfile.mkdtemp() if RANK == 0 else None]
dist.broadcast_object_list(folder)
checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
checkpoint.async_save(
    {"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/async", process_group=dist.new_group(backend="gloo")
)
model(batch()).sum().backward()
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if RANK == 0:
    print(*full)
