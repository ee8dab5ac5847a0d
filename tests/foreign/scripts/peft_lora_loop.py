"""A plain loop with PEFT's LoRA on Mistral 7B in bf16."""

# bytes: 7.24e9 * 2
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MistralConfig

model = AutoModelForCausalLM.from_config(MistralConfig(), dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).cuda()
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
for _ in range(3):
    tokens = torch.randint(32000, (1, 128), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
