"""A tokenizer without files: one token per UTF-8 byte, and one special token per role of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.data import Message, truncate

SPECIAL_NAMES = ("bos", "eos", "pad", "system", "user", "assistant", "ipython", "eot")
SPECIAL_TOKENS = {f"<|{name}|>": 256 + offset for offset, name in enumerate(SPECIAL_NAMES)}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


class DemoTokenizer:
    """A byte tokenizer with the interface that torchtune's datasets, recipes and generation require.

    The tokens of a message are that of its role, its bytes and, at the end of a turn, `<|eot|>`. As in torchtune's
    Llama 3 tokenizer, `<|bos|>` and `<|eos|>` never count in the loss, but `<|eot|>` counts if its message does.
    """

    def __init__(self, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len
        self.bos_id, self.eos_id, self.pad_id, *_, self.eot_id = SPECIAL_TOKENS.values()
        self.stop_tokens = [self.eos_id, self.eot_id]

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, token_ids: Sequence[int], truncate_at_eos: bool = True) -> str:
        """Return the text of tokens, without special tokens."""
        ids = list(token_ids)
        if truncate_at_eos and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        # truncation may split a character
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def tokenize_messages(
        self, messages: Sequence[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and a mask of those that the loss ignores.

        Without `add_end_tokens`, no token marks the end of the last message, so that a model can continue it.
        """
        pairs = [(self.bos_id, True)]
        for position, message in enumerate(messages, start=1):
            ends = message.eot and (add_end_tokens or position < len(messages))
            tokens = [*message.text_content.encode(), *[self.eot_id] * ends]
            pairs += [(token, message.masked) for token in (SPECIAL_TOKENS[f"<|{message.role}|>"], *tokens)]
        last = (self.eos_id, True) if add_end_tokens else None
        if last:
            pairs.append(last)
        if self.max_seq_len:
            pairs = truncate(pairs, self.max_seq_len, last)
        return [token for token, _ in pairs], [masked for _, masked in pairs]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace the messages of a sample by `tokens` and `mask`."""
        others = {key: value for key, value in sample.items() if key != "messages"}
        tokens, mask = self.tokenize_messages(sample["messages"], add_end_tokens=not inference)
        return {**others, "tokens": tokens, "mask": mask}
