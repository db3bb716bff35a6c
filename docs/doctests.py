"""For `make docs`: examples in docstrings (`>>> `) become blocks of code, which Markdown would take for quotations, and the line
OPTIONS what it is in Python: each option of a search."""

import inspect
import re
from importlib import import_module
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!$).*\n?)*\n*)+", re.M)


class Doctests(Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: Any, **_others: Any) -> None:
        if obj.docstring is not None:
            if re.search(r"^OPTIONS$", obj.docstring.value, re.M):
                obj.docstring.value = inspect.getdoc(getattr(import_module(obj.module.path), obj.name)) or ""
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```python\n{found[0].rstrip()}\n```\n\n", obj.docstring.value
            )
