"""For `make docs`: examples in docstrings (`>>> `) become blocks of code, which Markdown would take for quotations."""

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!$).*\n?)*\n*)+", re.M)


class Doctests(Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: Any, **_others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```python\n{found[0].rstrip()}\n```\n\n", obj.docstring.value
            )
