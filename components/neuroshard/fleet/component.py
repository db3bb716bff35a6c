"""KFP: what the night begins with, and where the pod of a job is to be put."""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from neuroshard.component import component


@component
def survey(
    models: str,
    store: str,
    backend: str,
    nodes: str,
    node_selector: str,
    tolerations: str,
    compute_cases: int,
    comm_cases: int,
    batch_size: int,
    seed: int,
    pods: int,
    max_age: str,
    max_error: float,
) -> NamedTuple("Survey", [("night", str), ("works", List[str]), ("names", List[str])]):  # type: ignore[valid-type] # noqa: UP006
    """The fleet against the store's cost models: what to measure first, and which cost model each model is searched with."""
    from neuroshard.core.units import parse_duration
    from neuroshard.fleet.night import run
    from neuroshard.fleet.run import json_option

    found = run(
        models,
        store,
        backend=backend,
        recorded=nodes,
        node_selector=json_option(node_selector, dict, "node_selector"),
        tolerations=json_option(tolerations, list, "tolerations"),
        request={"cases": [compute_cases, comm_cases], "seed": seed},
        batch_size=batch_size,
        most_pods=pods,
        max_age_seconds=parse_duration(max_age) if max_age else None,
        max_error=max_error or None,
    )
    return (
        found.canonical_json().decode(),
        [work.canonical_json().decode() for work in found.works],
        [order.name for order in found.orders],
    )


@component
def place(
    job: str,
) -> NamedTuple("Place", [("gpus", str), ("resource", str), ("nodes", dict), ("tolerations", list)]):  # type: ignore[valid-type]
    """Where the pod of a job is to be put, and what it asks for: a loop's own items cannot be told to Kubernetes."""
    from neuroshard.core.nightly import Job, told

    work = told(Job, job).work
    return (
        str(work.devices) if work.resource else "0",
        work.resource or "nvidia.com/gpu",
        work.node_selector,
        list(work.tolerations),
    )
