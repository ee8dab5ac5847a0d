"""Makes what example scripts of TRL, transformers and torchtitan load: models without weights, and rows of data.

python benchmarks/hub.py FOLDER
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HUB = Path(__file__).with_name("hub.json")
"""The sizes of the models and the columns of the data sets, by their names on the hub."""


def save_model(folder: Path, config: dict[str, Any], special: list[str], about: dict[str, Any]) -> None:
    """Save the config, and a tokenizer whose words are letters."""
    kind, merges = config["model_type"], [("Ġ", letter) for letter in string.ascii_letters]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")
    AutoConfig.for_model(**config, architectures=[architecture]).save_pretrained(folder)
    ids = {word: at for at, word in enumerate([*special, *string.ascii_letters, "Ġ", *map("".join, merges)])}
    if kind in ("qwen2", "llama"):  # for qwen2, transformers loads no other class; GOLD needs bytes
        Qwen2Tokenizer(vocab=ids, merges=merges, **about).save_pretrained(folder)
        return
    words = Tokenizer(models.WordLevel(ids, about["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind in ("bert", "roberta", "xlnet", "t5"):
        words.post_processor = processors.BertProcessing(*((word, ids[word]) for word in ("[SEP]", "[CLS]")))
    PreTrainedTokenizerFast(tokenizer_object=words, **about).save_pretrained(folder)


def made(column: Any) -> Any:
    """Replace each "5 words" in a description of columns by a text of so many words."""
    if isinstance(column, dict):
        return {name: made(each) for name, each in column.items()}
    if isinstance(column, list):
        return [made(each) for each in column]
    if isinstance(column, str) and column.endswith(" words"):
        return " ".join(random.choices(string.ascii_letters, k=int(column.split()[0])))
    return column


def save_data(folder: Path, about: dict[str, Any]) -> None:
    """Save three splits as JSON Lines, which scripts load by the name of the folder, and as files for --train_file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for split, rows in about.get("splits", {"train": 256, "validation": 16, "test": 64}).items():
        made_rows = [made(about["columns"]) for _ in range(rows)]
        lines = "\n".join(map(json.dumps, made_rows))
        (folder / f"{split}.jsonl").write_text(lines)
        (folder / f"{split}.json").write_text(json.dumps({"data": made_rows}) if about.get("nested") else lines)
        files.append({"split": split, "path": f"{split}.jsonl"})
    configs = [{"config_name": about.get("subset", "default"), "data_files": files}]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")


if __name__ == "__main__":
    random.seed(0)
    hub, root = json.loads(HUB.read_text(encoding="utf-8")), Path(sys.argv[1])
    for names, each in hub["models"].items():
        about = {**hub["tokenizer"], "model_max_length": each.get("longest", 32768)}
        for name in names.split():
            save_model(root / name, each["config"], hub["words"], about)
    for names, each in hub["data"].items():
        for name in names.split():
            save_data(root / name, each)
