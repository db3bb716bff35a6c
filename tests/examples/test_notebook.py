"""examples/notebook.ipynb runs from top to bottom, and what its cells end in shows itself in a notebook."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5

    for cell in cells:
        shown = run("".join(cell["source"]), names)

        assert "<" in shown._repr_html_()
        assert len(repr(shown).splitlines()) <= 2 or type(shown).__name__ == "DataFrame"

    assert names["plan"].digest() != names["tighter"].digest()


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
