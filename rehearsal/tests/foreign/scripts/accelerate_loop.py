"""accelerate: a loop with accumulation, DataLoader workers and a cosine schedule on 4 GPUs."""

# command: -- accelerate launch --num_processes 4 --mixed_precision bf16 SCRIPT
# bytes: 335.1e6 * (4 + 4 + 8 + 4 + 4)
import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForMaskedLM, get_cosine_schedule_with_warmup

accelerator = Accelerator(gradient_accumulation_steps=2)
model = BertForMaskedLM(
    BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.ones(64, 128, dtype=torch.long), batch_size=2, num_workers=2)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 10)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
for tokens in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
