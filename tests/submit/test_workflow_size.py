"""How large Argo's record of a night is by a formula, which docs/operating.md shows: 1 MB is where Argo compresses it."""

from collections.abc import Callable
from pathlib import Path

import yaml

from helpers.workflow_size import WorkflowSizer
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
    models, kinds = 10, 4
    size = WorkflowSizer(spec, platform, values=MODEL_BYTES * models + OTHER_BYTES, message=0).size(
        items(models, kinds)
    )
    said = f"{models} models and {kinds} kinds has {size.nodes} nodes and {size.nbytes / 1e6:.1f} MB"
    assert said in " ".join(OPERATING.read_text().split())
