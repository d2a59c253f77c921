"""An extension of griffe: examples in docstrings (`>>>`) become blocks of code, wherever they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?m)^( *)>>> .*(?:\n(?! *$).*)*")


class Examples(griffe.Extension):
    """Docstrings of this project have examples between paragraphs, not in a section of their own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The docstring with a fence around each example.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo.").splitlines()
    ['One.', '', '```python', '>>> 1 + 1', '2', '```', '', 'Two.']
    """
    without = re.sub(r" *# doctest: \+\w+", "", text)
    return _EXAMPLE.sub(lambda match: f"{match[1]}```python\n{match[0]}\n{match[1]}```", without)
