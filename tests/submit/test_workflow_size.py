"""How large Argo's record of a night is by a formula, which docs/operating.md shows: 1 MB is where Argo compresses it."""

import re
from collections.abc import Callable
from pathlib import Path

import yaml

from helpers.workflow_size import WorkflowSizer
from neuroshard.core.text import counted
from neuroshard.submit.package import PACKAGE

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
MODEL_BYTES, OTHER_BYTES = 250, 600  # of the parameters: each model of models.yaml, and the others


def items(models: int, kinds: int) -> Callable[[str, tuple[int, ...]], int]:
    """The items of a night that measures so many kinds of hardware in a pod each, for which its models wait."""

    def of(loop: str, at: tuple[int, ...]) -> int:
        later = len(range(at[0], models - 1, kinds)) if at else 0  # but the last one, shared evenly among the kinds
        return {"kinds": kinds, "shares": 1, "at_once": 0, "later": later}[loop]

    return of


def test_the_docs_say_how_large_workflows_of_this_pipeline_are() -> None:
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    rows = []
    for models in (1, 3, 10):
        for kinds in (1, 4):
            sizer = WorkflowSizer(spec, platform, values=MODEL_BYTES * models + OTHER_BYTES, message=0)
            size = sizer.size(items(models, kinds))
            rows.append(
                f"| {counted(models, 'model')}, {counted(kinds, 'kind')} | {size.nodes} | {size.nbytes / 1e6:.2f} MB |"
            )
    table = re.findall(r"^\| \d+ models?, \d .*$", OPERATING.read_text(), re.M)
    assert table == rows, "docs/operating.md, What a night costs, must say:\n" + "\n".join(rows)
