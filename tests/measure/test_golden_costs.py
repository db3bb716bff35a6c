"""A cost set as format 1 left it on disk: read today it is the same, and the formula still gives these numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuroshard.core.case import Cases
from neuroshard.core.cost import Costs
from neuroshard.files.costs import read_costs, read_manifest
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.formula import Synthetic

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_golden_costs_are_read_as_they_were_written():
    costs = read_costs(GOLDEN / "costs-1")
    golden = Costs.parse(json.loads((GOLDEN / "costs-1.json").read_text()), "costs-1.json")
    assert costs == golden.model_copy(update={"tables": read_manifest(GOLDEN / "costs-1").tables})


def test_the_formula_gives_the_golden_costs():
    costs = read_costs(GOLDEN / "costs-1")
    compute, collective = tuple(case for case, _ in costs.compute), tuple(case for case, _ in costs.collective)
    tables = tuple(table for case in compute for table in case.tables)
    backend = Synthetic(
        Cases(tables=tables, compute=compute, collective=collective, max_dim=64, seed=0),
        MeasureSettings(batch_size=512),
        None,
    )

    again: list[Any] = [
        *(backend.compute(case, cost.round) for case, cost in costs.compute),
        *(backend.all_to_all(case, cost.round) for case, cost in costs.collective),
    ]
    for cost, (_, golden) in zip(again, costs.compute + costs.collective, strict=True):
        assert (cost.case_id, cost.round, cost.error) == (golden.case_id, golden.round, golden.error)
        if golden.error is None:  # the formula's estimate of distinct rows is a little better today
            assert cost.forward_ms == pytest.approx(golden.forward_ms, rel=2e-3)
            assert cost.backward_ms == pytest.approx(golden.backward_ms, rel=2e-3)
