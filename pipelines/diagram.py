"""pipelines/neuroshard.yaml -> a Mermaid diagram of its steps, as docs/operating.md shows it.

python -m pipelines.diagram
"""

from pathlib import Path
from typing import Any

import yaml

from neuroshard.submit.steps import loop_source

PACKAGE = Path(__file__).with_name("neuroshard.yaml")


def diagram(spec: dict[str, Any]) -> str:
    """Every step as a node, every loop as a box, every dependence as an arrow."""
    return "\n".join(["flowchart LR", *_dag(spec, spec["root"]["dag"], "  ", "")])


def _dag(spec: dict[str, Any], dag: dict[str, Any], indent: str, within: str) -> list[str]:
    """The tasks of a DAG. Task names are unique in one DAG alone, so a node's name begins with that of its box, `within`."""
    lines = []
    for name, task in dag["tasks"].items():
        inner = spec["components"][task["componentRef"]["name"]].get("dag")
        node = f"{within}{name}"
        if inner is None:
            lines.append(f"{indent}{node}[{name}]")
        else:
            lines += [
                f'{indent}subgraph {node}["{_title(name, task, inner)}"]',
                *_dag(spec, _only_loop(spec, inner), f"{indent}  ", f"{node}-"),
                f"{indent}end",
            ]
        lines += [f"{indent}{within}{before} --> {node}" for before in task.get("dependentTasks", ())]
    return lines


def _loop(inner: dict[str, Any]) -> dict[str, Any] | None:
    """The loop that is all of a DAG, as a pipeline of its own has it."""
    tasks = list(inner["tasks"].values())
    return tasks[0] if len(tasks) == 1 and "parameterIterator" in tasks[0] else None


def _only_loop(spec: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    loop = _loop(inner)
    body: dict[str, Any] = spec["components"][loop["componentRef"]["name"]]["dag"] if loop else inner
    return body


def _title(name: str, task: dict[str, Any], inner: dict[str, Any]) -> str:
    loop = task if "parameterIterator" in task else _loop(inner)
    return f"for each of {loop_source(loop, {})[1]}" if loop else name


if __name__ == "__main__":
    print(diagram(next(yaml.safe_load_all(PACKAGE.read_text()))))
