"""Generation in inference mode with a static cache: Llama 3.1 8B in bf16, 256 new tokens for 4 prompts."""

# bytes: 8.03e9 * 2 + 4 * 768 * 2 * 32 * 1024 * 2
import torch
from models import llama_8b
from transformers import AutoModelForCausalLM

with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(llama_8b(), dtype=torch.bfloat16).eval()
model.generation_config.cache_implementation = "static"
prompts = torch.randint(0, 128000, (4, 512), device="cuda")
with torch.inference_mode():
    out = model.generate(prompts, max_new_tokens=256, do_sample=False, disable_compile=True)
assert out.shape == (4, 768)
