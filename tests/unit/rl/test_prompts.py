"""Prompts made of the rows of a table."""

from typing import Any

import pytest

from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.prompts import Prompts


class Rows(list[dict[str, str]]):
    """As much of a table as prompts need."""

    column_names = ("question", "answer")


ROWS = Rows([{"question": "1+1", "answer": "2"}])


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
