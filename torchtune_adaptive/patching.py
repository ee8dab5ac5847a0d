"""Other members for modules and classes of other libraries, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

Member: TypeAlias = tuple[object, str, object]
"""A module or a class, a name in it, and what is to be there."""


@contextmanager
def replaced(*members: Member) -> Iterator[None]:
    """While open, each module or class has this member under this name, in place of its own or of one it inherits."""
    with ExitStack() as undo:
        for where, name, member in members:
            if name in vars(where):
                undo.callback(setattr, where, name, vars(where)[name])
            else:
                undo.callback(delattr, where, name)
            setattr(where, name, member)
        yield
