"""What a reader is told about a name where it is defined, read from the source."""

from tests.unit.source import FILES, RECIPES, docstrings_of

LEANING = ("Of ", "That ", "Those ", "Which ")
"""First words that lean on the name above them: read alone, such a sentence has no subject."""


def test_a_docstring_has_a_subject_of_its_own() -> None:
    """But a module's, in its first line, may be what the module answers: which rank has stopped responding."""
    told = [(path, text) for path in [*FILES, *RECIPES] for text in docstrings_of(path) if text.lineno > 1]
    assert len(told) > 1000
    assert [(path, text.value) for path, text in told if text.value.lstrip().startswith(LEANING)] == []
