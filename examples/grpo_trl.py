"""TRL's GRPOTrainer on two ranks with too little memory for any of its passes. No GPU, no download:

pip install '.[hf]' trl
torchrun --nproc_per_node 2 examples/grpo_trl.py --memory_limit 22MiB
"""

from tempfile import TemporaryDirectory

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from torchtune_adaptive.hf import AdaptiveArguments, adaptive

(adaptive_arguments,) = HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses()
set_seed(0)
# Generate a model, a reward model, a tokenizer and prompts: words that count up.
words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(250)}, "<unk>"))
words.pre_tokenizer = WhitespaceSplit()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, num_labels=1)
prompts = [" ".join(f"w{start + step}" for step in range(20 + start % 29)) for start in range(96)]


def even_words(completion_ids, **_):
    """Return the share of even words in each answer."""
    return [sum(word % 2 == 0 for word in answer) / len(answer) for answer in completion_ids]


with TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)  # GRPOTrainer loads the policy and the reference model
    adaptive(GRPOTrainer)(
        folder,
        reward_funcs=[even_words, LlamaForSequenceClassification(config)],
        reward_processing_classes=[None, tokenizer],
        args=GRPOConfig(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=16,
            num_generations=8,
            num_iterations=2,
            max_completion_length=16,
            beta=0.04,
            max_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        adaptive=adaptive_arguments,
    ).train()
