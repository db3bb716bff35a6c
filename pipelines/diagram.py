"""pipelines/neuroshard.yaml -> a Mermaid diagram of its steps, as docs/operating.md shows it.

python -m pipelines.diagram
"""

from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).with_name("neuroshard.yaml")


def diagram(spec: dict[str, Any]) -> str:
    """Every step as a node, every loop as a box, every dependence as an arrow."""
    return "\n".join(["flowchart LR", *_dag(spec, spec["root"]["dag"], "  ")])


def _dag(spec: dict[str, Any], dag: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, task in dag["tasks"].items():
        inner = spec["components"][task["componentRef"]["name"]].get("dag")
        loop = inner and next((t for t in inner["tasks"].values() if "parameterIterator" in t), None)
        if loop:
            body = spec["components"][loop["componentRef"]["name"]]["dag"]
            items = loop["parameterIterator"]["items"]["inputParameter"].removeprefix("pipelinechannel--")
            lines += [
                f'{indent}subgraph {name}["for each of {items}"]',
                *_dag(spec, body, f"{indent}  "),
                f"{indent}end",
            ]
        else:
            lines.append(f"{indent}{name}")
        lines += [f"{indent}{before} --> {name}" for before in task.get("dependentTasks", ())]
    return lines


if __name__ == "__main__":
    print(diagram(next(yaml.safe_load_all(PACKAGE.read_text()))))
