"""A cost model of costs that somebody else computed, a table at a time: `neuroshard search --model given:costs.json`.

A planner's printout lists an estimate of each table's cost. The costs of a device's shards add up, and a shard of half the
columns costs half, times a factor if it is narrow. The file does not say how the all-to-all depends on columns, so its cost is
part of the table's. docs/formats.md describes the file.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from neuroshard.core.cost import MOST_MS
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import Part
from neuroshard.core.table import MAX_DIM, Table
from neuroshard.core.text import counted
from neuroshard.core.value import Number, Value, Whole, check_format, decode_json
from neuroshard.costmodel.protocol import Floats, Ints, Unlearned
from neuroshard.files.disk import read_bytes
from neuroshard.files.importers.imported import check_once, csv_rows, read_number

GIVEN_FORMAT: Literal[1] = 1
GivenMs = Annotated[Number, Field(ge=0, le=MOST_MS)]


class TableCost(Value):
    """Cost of one whole table in ms a step: `cost_ms`, or its parts. It is for the width `dim`, by default the table's own."""

    name: Annotated[str, Field(min_length=1)]
    cost_ms: GivenMs | None = None
    compute_ms: GivenMs | None = None
    forward_collective_ms: GivenMs = 0.0
    backward_collective_ms: GivenMs = 0.0
    dim: Annotated[Whole, Field(gt=0, le=MAX_DIM)] | None = None

    @model_validator(mode="after")
    def _one_cost(self) -> Self:
        if (self.cost_ms is None) == (self.compute_ms is None):
            raise ValueError(f"table {self.name!r} must have cost_ms, or compute_ms with the parts of the all-to-all")
        return self

    @property
    def total_ms(self) -> float:
        if self.cost_ms is not None:
            return self.cost_ms
        assert self.compute_ms is not None
        return self.compute_ms + self.forward_collective_ms + self.backward_collective_ms


NUMBERS = TableCost.model_fields.keys() - {"name"}


class Narrow(Value):
    """Shards of fewer than `below` columns cost `factor` times their share."""

    below: Annotated[Whole, Field(gt=0, le=2**31)]
    factor: Annotated[Number, Field(ge=1, le=1e6)]


class GivenCosts(Value):
    """costs.json. Every device takes `fixed_ms` in addition, whatever it holds."""

    format_version: Literal[1] = GIVEN_FORMAT
    tables: Annotated[tuple[TableCost, ...], Field(min_length=1)]
    fixed_ms: GivenMs = 0.0
    narrow: tuple[Narrow, ...] = ()
    batch_size: Annotated[Whole, Field(gt=0, le=2**31)] | None = None
    device_name: str = "costs as given"

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: set[str] = set()
        for table in self.tables:
            if table.name in seen:
                raise ValueError(f"table {table.name!r} has two costs; names must differ")
            seen.add(table.name)
        return self


class Given(Unlearned):
    """A protocol.CostModel of given costs. A shard's vector is one number, its ms."""

    backend = "given"
    bounded = True
    prices_rows = False
    operator_ms = 0.0
    reorder_ms = 0.0

    def __init__(self, costs: GivenCosts, batch_size: int) -> None:
        self.costs, self.batch_size = costs, batch_size

    @cached_property
    def name(self) -> str:
        return self.costs.digest()

    @property
    def device_name(self) -> str:
        return self.costs.device_name

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        """N parts with all rows -> (N, 1) ms. Raises InvalidInput that names a table without a cost.

        A cost includes the factor of its own width: half a table of 128 columns costs half of it times the factor of 64.
        """
        costs = [self._cost(part.table) for part in parts]
        dims = np.array([part.dim for part in parts], dtype=np.int64)
        given_dims = np.array(
            [cost.dim or part.table.dim for cost, part in zip(costs, parts, strict=True)], dtype=np.int64
        )
        whole_ms = np.array([cost.total_ms for cost in costs])
        ms: Floats = whole_ms * dims / given_dims * self._factors(dims) / self._factors(given_dims)
        return ms[:, None]

    def compute_ms(self, vector_sums: Floats) -> Floats:
        ms: Floats = vector_sums[..., 0] + self.costs.fixed_ms
        return ms

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return np.ones_like(vector_sums)

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        """Waiting alone: the transfer is part of the tables' costs."""
        waiting: Floats = start_delays_ms.max(axis=-1, keepdims=True) - start_delays_ms
        return waiting

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        return np.zeros_like(device_dims, dtype=np.float64)

    @cached_property
    def _by_name(self) -> dict[str, TableCost]:
        return {cost.name: cost for cost in self.costs.tables}

    def _cost(self, table: Table) -> TableCost:
        if table.name not in self._by_name:
            raise InvalidInput(
                f"table {table.name!r} has no given cost; there are costs of "
                f"{counted(len(self._by_name), 'table')}: add one of this name"
            )
        return self._by_name[table.name]

    def _factors(self, dims: Ints) -> Floats:
        factors = np.ones(len(dims))
        for narrow in sorted(self.costs.narrow, key=lambda n: -n.below):
            factors[dims < narrow.below] = narrow.factor
        return factors


def load_given(path: Path, batch_size: int | None = None) -> Given:
    """Costs from a .json or .csv. Raises InvalidInput in one line that names the file, UsageError without a batch size."""
    read = {".json": _read_json, ".csv": _read_csv}.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"given:{path}: its name has no known suffix; known: .json, .csv")
    costs = GivenCosts.parse(read(path), str(path))
    batch_size = batch_size or costs.batch_size
    if batch_size is None:
        raise UsageError(f"{path} has no batch_size: add it, or give --batch-size, samples a step over all devices")
    return Given(costs, batch_size)


def _read_json(path: Path) -> dict[str, Any]:
    return check_format(decode_json(read_bytes(path), str(path)), GIVEN_FORMAT, str(path))


def _read_csv(path: Path) -> dict[str, Any]:
    """A header line with names of TableCost fields, then a line a table. An empty cell counts as absent."""
    columns, rows = csv_rows(path)
    check_once(columns, path)
    return {
        "tables": [
            {name: read_number(name, cell, where) if name in NUMBERS else cell for name, cell in row.items()}
            for where, row in rows
        ]
    }
