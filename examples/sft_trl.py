"""TRL's SFTTrainer on two ranks with too little memory for their batches. No GPU, no download:

pip install '.[hf]' trl
torchrun --nproc_per_node 2 examples/sft_trl.py --memory_limit 24MiB
"""

import random
from tempfile import TemporaryDirectory

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from torchtune_adaptive.hf import AdaptiveArguments, adaptive

(adaptive_arguments,) = HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses()
set_seed(0)
# Generate a model, a tokenizer and data: words that count up.
words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(250)}, "<unk>"))
words.pre_tokenizer = WhitespaceSplit()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))
starts = [random.randrange(200) for _ in range(96)]
lines = [" ".join(f"w{start + step}" for step in range(random.randint(20, 48))) for start in starts]
with TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        per_device_train_batch_size=16,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    adaptive(SFTTrainer)(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": lines}),
        processing_class=tokenizer,
        adaptive=adaptive_arguments,
    ).train()
