"""sentence-transformers: in-batch negatives with a BERT base model."""

# bytes: 109.5e6 * (4 + 4 + 8)
from datasets import Dataset
from models import save_tokenizer
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import AutoModel, BertConfig

save_tokenizer("bert")
AutoModel.from_config(BertConfig()).save_pretrained("bert")
words = Transformer("bert", max_seq_length=64)
model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())])
data = Dataset.from_dict({"anchor": ["the quick fox"] * 64, "positive": ["the brown fox"] * 64})
arguments = SentenceTransformerTrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=3, report_to=[], save_strategy="no"
)
SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)).train()
