"""Prompts made of the rows of a table."""

from typing import Any

import pytest
from datasets import Dataset

from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.prompts import Prompts

ROWS = Dataset.from_list([{"question": "1+1", "answer": "2"}])


def test_a_template_makes_a_prompt_of_a_row() -> None:
    tokenizer = DemoTokenizer()
    prompt = Prompts(tokenizer, ROWS, "question", None, "Q {question}=")[0]
    assert (tokenizer.decode(prompt["tokens"]), prompt["answer"]) == ("Q 1+1=", "2")


@pytest.mark.parametrize(
    ("template", "said"),
    [("Q {questin}=", "'Q {questin}=', .* (KeyError: 'questin')"), ({"question": None}, "{'question': None}, .* (A")],
)
def test_a_template_that_cannot_be_filled_is_told_with_the_columns(template: Any, said: str) -> None:
    said = said.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=rf"^dataset\.template is {said}.* in braces, of question, answer$"):
        Prompts(DemoTokenizer(), ROWS, "question", None, template)
