"""Which predicted costs may be compared."""

from typing import Any

import pytest

from helpers.plans import TABLES, make_plan
from neuroshard.core.comparable import why_not_comparable
from neuroshard.core.plan import Plan
from neuroshard.core.precision import parse_precision
from neuroshard.core.topology import topology_of


def priced(by: str | None = "a", **task: Any) -> Plan:
    plan = make_plan()
    changed = plan.task.model_copy(update=task)
    provenance = plan.provenance.model_copy(update={"cost_model": by})
    return plan.model_copy(update={"task": changed, "task_digest": changed.digest(), "provenance": provenance})


def test_costs_of_one_cost_model_for_the_same_work_can_be_compared() -> None:
    assert why_not_comparable(priced(), priced()) == ""
    assert why_not_comparable(priced(), priced(device_memory_bytes=(2**21,) * 4)) == ""
    assert why_not_comparable(priced(), priced(pipeline="prefetch")) == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (priced("b"), "are of other cost models"),
        (priced(tables=TABLES[:2]), "are for other tables"),
        (priced(batch_size=128), "are for other batch sizes"),
        (priced(topology=topology_of(2, 1, 1, "")), "are for other topologies"),
        (priced(collective_precision=parse_precision("fp16")), "are for other collective precisions"),
        (priced(pipeline="none"), "are for other pipelines"),
        (priced(pipeline="prefetch", dense_ms=5.0), "are for other dense times"),
    ],
)
def test_costs_of_other_work_cannot_be_compared(other: Plan, why: str) -> None:
    assert why_not_comparable(priced(), other) == why_not_comparable(other, priced()) == f"the predictions {why}"


def test_all_that_is_not_alike_is_said_and_hosts_of_one_domain_are_alike() -> None:
    other = priced("b", batch_size=128, topology=topology_of(2, 1, 1, ""))
    assert why_not_comparable(priced(), other) == (
        "the predictions are of other cost models, and for other batch sizes and topologies"
    )
    assert why_not_comparable(priced(), priced(topology=topology_of(2, 2, 1, ""))) == ""


def test_costs_by_an_unknown_cost_model_cannot_be_compared() -> None:
    assert why_not_comparable(priced(None), priced(None)) == "the predictions are of other cost models"
