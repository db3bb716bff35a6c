"""An embedding table, as everything else sees it: its shape, how it is read, and what it occupies."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from neuroshard.core.reuse import REFERENCE_BATCH_SIZE, REUSE_BINS, uniform_bins
from neuroshard.core.value import Number, Value, Whole, shown, without_defaults

DIM_STEP = 4  # FBGEMM's fused kernels need widths divisible by 4
MAX_NAME = 500  # characters
MAX_ROWS = 2**40
MAX_DIM = 2**16

# Bytes of optimizer state (a row, an element), fp32 moments; FBGEMM's row-wise Adagrad keeps one moment a row.
OPTIMIZER_BYTES = {"sgd": (0, 0), "rowwise_adagrad": (4, 0), "adagrad": (0, 4), "adam": (0, 8)}
ELEMENT_BYTES = {"fp32": 4, "fp16": 2}

Pooling = Literal["sum", "mean"]
_UNSAID = {"pooling": "sum", "weighted": False, "module": ""}  # left out of JSON where they say no more than this


class Table(Value):
    """One embedding table, or a shard of one (the same table with a smaller `dim`, or with fewer rows and lookups).

    `pooling_factor` is the mean number of lookups a sample. `reuse_bins` (see core/reuse.py) were counted on a batch of
    `reuse_batch_size`; a table that comes without them is taken to be read uniformly. Memory counts the weights and the
    optimizer's state, by default row-wise Adagrad's: 4 bytes a row. `pooling` is what the rows of a sample are made into;
    `weighted` says that each lookup comes with a weight of its own (TorchRec's `is_weighted`). `module` is the path of the
    module that holds the table in the trainer's model, "" where that is not known; where two modules hold tables of one name,
    `name` is the path, a dot and that name.
    """

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    rows: Whole
    dim: Whole
    pooling_factor: Number
    reuse_bins: tuple[float, ...] = ()  # filled in before the checks
    reuse_batch_size: Annotated[Whole, Field(gt=0, le=2**31)] = REFERENCE_BATCH_SIZE
    element_bytes: Whole = 4
    optimizer_bytes_per_row: Annotated[Whole, Field(ge=0, le=64)] = 4
    optimizer_bytes_per_element: Annotated[Whole, Field(ge=0, le=64)] = 0
    pooling: Pooling = "sum"
    weighted: bool = False
    module: Annotated[str, Field(max_length=MAX_NAME)] = ""

    @model_serializer(mode="wrap")
    def _say_no_more_than_needed(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(fields(self), _UNSAID)

    @model_validator(mode="before")
    @classmethod
    def _read_uniformly_unless_said(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("reuse_bins") is not None:
            return data
        try:
            rows, pooling, batch = (
                float(data["rows"]),
                float(data["pooling_factor"]),
                float(data.get("reuse_batch_size", REFERENCE_BATCH_SIZE)),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return {**data, "reuse_bins": (0.0,) * REUSE_BINS}  # the field's own check has the better message
        usable = all(map(math.isfinite, (rows, pooling, batch))) and rows >= 1 and pooling >= 0 and batch >= 1
        bins = uniform_bins(int(rows), pooling, int(batch)) if usable else (0.0,) * REUSE_BINS
        return {**data, "reuse_bins": bins}

    @field_validator("name", "module")
    @classmethod
    def _name(cls, name: str) -> str:
        # messages and reports are of lines, and a terminal obeys control characters, those beyond ASCII too
        if any(char < " " or "\x7f" <= char < "\xa0" or char in "\u2028\u2029" for char in name):
            raise ValueError(f"must have no line breaks or control characters, not {name!r:.80}")
        return name

    @field_validator("rows")
    @classmethod
    def _rows(cls, rows: int) -> int:
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"must be between 1 and 2^40, not {shown(rows)}")
        return rows

    @field_validator("dim")
    @classmethod
    def _dim(cls, dim: int) -> int:
        if dim < DIM_STEP or dim % DIM_STEP:
            raise ValueError(
                f"must be a positive multiple of {DIM_STEP} (FBGEMM's fused kernels need it), not {shown(dim)}"
            )
        if dim > MAX_DIM:
            raise ValueError(f"must be at most {MAX_DIM}, not {shown(dim)}")
        return dim

    @field_validator("pooling_factor")
    @classmethod
    def _pooling_factor(cls, pooling_factor: float) -> float:
        if not 0 <= pooling_factor <= 1e9:
            raise ValueError(f"must be between 0 and 1e9 lookups a sample, not {pooling_factor}")
        return pooling_factor

    @field_validator("element_bytes")
    @classmethod
    def _element_bytes(cls, element_bytes: int) -> int:
        if element_bytes not in ELEMENT_BYTES.values():
            raise ValueError(f"must be 4 (fp32) or 2 (fp16), not {shown(element_bytes)}")
        return element_bytes

    @field_validator("reuse_bins")
    @classmethod
    def _reuse_bins(cls, bins: tuple[float, ...]) -> tuple[float, ...]:
        if len(bins) != REUSE_BINS:
            raise ValueError(f"must be {REUSE_BINS} shares, not {len(bins)}")
        if min(bins) < 0:
            raise ValueError(f"must not be negative, not {min(bins)}")
        total = math.fsum(bins)
        if total and abs(total - 1) > 0.02:
            raise ValueError(f"must sum to 1 (or be all 0 for a table never read), not {total:g}")
        # only what is off is scaled: a table read back has the very bins, and so the digest, that was written
        return tuple(b / total for b in bins) if total and abs(total - 1) > 1e-9 else bins

    @property
    def name_in_module(self) -> str:
        """The name that the module knows the table by."""
        return self.name.removeprefix(f"{self.module}.") if self.module else self.name

    @property
    def operator_key(self) -> tuple[int, Pooling, bool]:
        """Tables of a device with the same key share one fused operator, as TorchRec groups them."""
        return self.element_bytes, self.pooling, self.weighted

    def with_dim(self, dim: int) -> Self:
        """The same table cut to `dim` columns. The caller answers for the multiple of 4."""
        return self.model_copy(update={"dim": dim})

    def part(self, rows: int, dim: int) -> Self:
        """A rectangle of the table as a table of its own: some of its rows have their share of the lookups, as if all rows
        were looked up alike. The caller answers for the multiple of 4."""
        if rows == self.rows:
            return self.with_dim(dim)
        share = {"rows": rows, "dim": dim, "pooling_factor": self.pooling_factor * rows / self.rows}
        return self.model_copy(update=share)

    def row_blocks(self, devices: int) -> list[tuple[int, int]]:
        """First row and number of rows of each device where all share the rows, as TorchRec's ROW_WISE deals them out: blocks of
        ceil(rows / devices) in order, of which the last are smaller, or empty where there are hardly more rows than devices."""
        block = self.block_rows(devices)
        firsts = [min(device * block, self.rows) for device in range(devices)]
        return [(first, min(block, self.rows - first)) for first in firsts]

    def has_rows_for(self, devices: int) -> bool:
        """Whether none of these blocks is empty."""
        return self.block_rows(devices) * (devices - 1) < self.rows

    def block_rows(self, devices: int) -> int:
        """Rows of the first of these blocks, which none has more of."""
        return -(-self.rows // devices)

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * self.element_bytes

    @property
    def memory_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.shard_bytes(self.rows, self.dim)

    def shard_bytes(self, rows: int, dim: int) -> int:
        """What a rectangle of this table occupies. Row-wise state is kept once by every column shard."""
        return rows * (dim * (self.element_bytes + self.optimizer_bytes_per_element) + self.optimizer_bytes_per_row)


def check_distinct(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """Tables of a set: at least one, no name twice. Raises ValueError."""
    if not tables:
        raise ValueError("the list of tables is empty")
    first: dict[str, int] = {}
    for index, table in enumerate(tables):
        if table.name in first:
            raise ValueError(
                f"tables[{index}] and tables[{first[table.name]}] are both named {table.name!r}; names must differ"
            )
        first[table.name] = index
    return tables
