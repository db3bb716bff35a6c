"""An embedding table: its shape, how it is read, and the memory that it occupies."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator

from neuroshard.core.access import LOOSE, AccessCurve, access_law, stated_curve
from neuroshard.core.errors import UsageError
from neuroshard.core.id_map import IdMap
from neuroshard.core.reuse import REFERENCE_BATCH_SIZE, REUSE_BINS, uniform_bins, zipf_bins
from neuroshard.core.row_order import RowOrder
from neuroshard.core.skew import Loads
from neuroshard.core.value import Number, SparseValue, Switch, Value, Whole, shown

DIM_STEP = 4  # FBGEMM's fused kernels need widths divisible by 4
MAX_NAME = 500  # characters
MAX_ROWS = 2**40
MAX_DIM = 2**16

# Bytes of optimizer state (a row, an element): the fp32 moments of FBGEMM 1.8's SplitTableBatchedEmbeddingBagsCodegen.
OPTIMIZER_BYTES = {
    "sgd": (0, 0),
    "rowwise_adagrad": (4, 0),
    "adagrad": (0, 4),
    "adam": (0, 8),
    "partial_rowwise_adam": (4, 4),
    "lamb": (0, 8),
    "partial_rowwise_lamb": (4, 4),
    "lars_sgd": (0, 4),
}
# Values of state (a row, an element) that the dense optimizers of torch.optim, and RowWiseAdagrad of torchrec.optim, keep for a
# parameter, each as wide as an element of it (seen in their state, torch 2.13).
DenseOptimizer = Literal[
    "sgd", "momentum", "adagrad", "rowwise_adagrad", "rmsprop", "adadelta", "adam", "adamw", "nadam", "radam", "amsgrad"
]
DENSE_STATE: dict[DenseOptimizer, tuple[int, int]] = {
    "sgd": (0, 0),
    "momentum": (0, 1),
    "adagrad": (0, 1),
    "rowwise_adagrad": (1, 0),
    "rmsprop": (0, 1),
    "adadelta": (0, 2),
    "adam": (0, 2),
    "adamw": (0, 2),
    "nadam": (0, 2),
    "radam": (0, 2),
    "amsgrad": (0, 3),
}


def check_dense_optimizer(name: str) -> DenseOptimizer:
    """The dense optimizer of this name. Raises UsageError if there is none."""
    if name not in DENSE_STATE:
        raise UsageError(
            f"dense optimizer {name!r} is none of {', '.join(DENSE_STATE)}; name one that keeps as many values an element"
        )
    return name


ELEMENT_BYTES = {"fp32": 4, "fp16": 2}

MOST_LOOKUPS = 1e9  # a sample
MOST_FEATURES = 4096  # of one table
MOST_RANGES = 4096  # of ids
AGREEING = 0.02  # how far the lookups of an access curve may be off the pooling factor
VECTOR_STEPS = 256  # vectors a sample are counted in steps of 1/256, so that sums of columns are exact in any order

Pooling = Literal["sum", "mean", "none"]


class Feature(Value):
    """A feature that reads a table, with its mean number of lookups a sample."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    pooling_factor: Annotated[Number, Field(ge=0, le=MOST_LOOKUPS)]

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _of_one_line(name)


class Table(SparseValue):
    """One embedding table, or a shard of one (the same table with a smaller `dim`, or with fewer rows and lookups).

    `pooling_factor` is the mean number of lookups a sample. `reuse_bins` (see core/reuse.py) were counted on a batch of
    `reuse_batch_size`; a table that comes without them is taken to be read uniformly. Memory counts the weights and the
    optimizer's state, by default row-wise Adagrad's: 4 bytes a row. `pooling` is what the rows of a sample are made into: "none"
    is a sequence, whose every lookup is sent (TorchRec's EmbeddingCollection). `features` read the table; they are pooled each
    by itself, and `pooling_factor` is the sum of theirs. Without `features` one reads it, whose name does not matter. `weighted`
    says that each lookup comes with a weight of its own (TorchRec's `is_weighted`). `module` is the path of the module that
    holds the table in the trainer's model, "" where that is not known; where two modules hold tables of one name, `name` is the
    path, a dot and that name. `access` says how its rows are read (core/access.py); "zipf:1.05" is short for such a curve.
    `lookups_by_id` are the shares of the lookups in so many equal ranges of ids, in order.
    `row_order` says which rows are hottest (core/row_order.py); the table may have grown since it was made.
    A table with an `id_map` gives rows to ids as it trains (core/id_map.py), and is row-wise over all devices whatever else.
    """

    UNSAID: ClassVar = ("pooling", "weighted", "module", "features", "access", "row_order", "lookups_by_id", "id_map")

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
    weighted: Switch = False
    module: Annotated[str, Field(max_length=MAX_NAME)] = ""
    features: Annotated[tuple[Feature, ...], Field(max_length=MOST_FEATURES)] = ()
    access: AccessCurve | None = None
    row_order: RowOrder | None = None
    lookups_by_id: Annotated[tuple[Annotated[Number, Field(ge=0, le=2)], ...], Field(max_length=MOST_RANGES)] = ()
    id_map: IdMap | None = None
    _every_lookup: float | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _uniform_by_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = _with_pooling_factor_of_features(data)
        access = data.get("access")
        if data.get("reuse_bins") is not None and not isinstance(access, str):
            return data
        try:
            rows, pooling, batch = (
                float(data["rows"]),
                float(data["pooling_factor"]),
                float(data.get("reuse_batch_size", REFERENCE_BATCH_SIZE)),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return {**data, "reuse_bins": (0.0,) * REUSE_BINS}  # the field's own check has the better message
        usable = 1 <= rows <= MAX_ROWS and 0 <= pooling <= MOST_LOOKUPS and 1 <= batch < 2**32
        if not usable:
            return {**data, "reuse_bins": (0.0,) * REUSE_BINS}
        return _with_bins(data, int(rows), pooling, int(batch))

    @field_validator("name", "module")
    @classmethod
    def _name(cls, name: str) -> str:
        return _of_one_line(name)

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
        if not 0 <= pooling_factor <= MOST_LOOKUPS:
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
            raise ValueError(f"must be at least 0, not {min(bins)}")
        if max(bins) > 2:  # before they are added, which may overflow
            raise ValueError(f"must be shares, not {max(bins):g}")
        total = math.fsum(bins)
        if total and abs(total - 1) > 0.02:
            raise ValueError(f"must sum to 1 (or be all 0 for a table never read), not {total:g}")
        # scaled only if the sum is off, so that a table read back has exactly the bins, and the digest, that were written
        return tuple(b / total for b in bins) if total and abs(total - 1) > 1e-9 else bins

    @field_validator("lookups_by_id")
    @classmethod
    def _lookups_by_id(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        total = math.fsum(shares)
        if shares and abs(total - 1) > AGREEING:
            raise ValueError(
                f"must be shares of the lookups that sum to 1, not to {total:g}; leave it out where none is known"
            )
        return tuple(share / total for share in shares) if shares and abs(total - 1) > 1e-9 else shares

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pooling == "none" and self.weighted:
            raise ValueError("a sequence (pooling none) has no weighted lookups")
        if self.access is not None:
            _check_access(self.access, self.rows, self.pooling_factor)
        if self.row_order is not None and self.row_order.rows > self.rows:
            raise ValueError(
                f"row_order is of a table with {self.row_order.rows:,} rows, but the table has {self.rows:,}; make it anew, or "
                "leave row_order out"
            )
        if len(self.lookups_by_id) > self.rows:
            raise ValueError(
                f"lookups_by_id has {len(self.lookups_by_id):,} ranges of ids, but the table has {self.rows:,} rows; say fewer"
            )
        if self.id_map is not None:
            self._check_id_map(self.id_map)
        if not self.features:
            return self
        names = [feature.name for feature in self.features]
        if len(set(names)) < len(names):
            raise ValueError(f"feature {next(n for n in names if names.count(n) > 1)!r} is there twice")
        total = math.fsum(feature.pooling_factor for feature in self.features)
        if not math.isclose(total, self.pooling_factor, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(
                f"pooling_factor is {self.pooling_factor:g}, but its features' sum up to {total:g}; leave pooling_factor out, or "
                "make them agree"
            )
        return self

    def _check_id_map(self, id_map: IdMap) -> None:
        if self.row_order is not None or self.lookups_by_id:
            raise ValueError(
                "id_map gives rows to ids as the table trains, and row_order and lookups_by_id are of ids that are rows; leave "
                "them out"
            )
        if id_map.buckets is not None and self.rows % id_map.buckets:
            raise ValueError(
                f"id_map has {id_map.buckets:,} buckets, which must have equally many of the {self.rows:,} rows; take a number "
                "of rows that they divide"
            )

    @property
    def name_in_module(self) -> str:
        """The name that the module knows the table by."""
        return self.name.removeprefix(f"{self.module}.") if self.module else self.name

    @property
    def operator_key(self) -> tuple[int, Pooling, bool, int]:
        """Tables of a device with the same key share one fused operator, as TorchRec groups them: of sequences, of one width."""
        return self.element_bytes, self.pooling, self.weighted, self.dim if self.pooling == "none" else 0

    @property
    def narrowest_cut(self) -> int:
        """Columns of the narrowest shard that a search cuts the table into. Sequences are cut into halves at most: shards of one
        operator must be equally wide."""
        if self.pooling != "none":
            return DIM_STEP
        return self.dim // 2 if self.dim % (2 * DIM_STEP) == 0 else self.dim

    @property
    def sent_once(self) -> bool:
        """Whether each distinct id of a rank's batch is looked up once (core/dedup.py): `pooling_factor` counts these alone."""
        return self._every_lookup is not None

    @property
    def every_lookup(self) -> float:
        return self.pooling_factor if self._every_lookup is None else self._every_lookup

    def with_dim(self, dim: int) -> Self:
        """The same table cut to `dim` columns, which must be a multiple of 4; that is not checked."""
        return self.model_copy(update={"dim": dim})

    def resized(self, rows: int, dim: int, pooling_factor: float) -> Self:
        """The same table with another size and other lookups; each feature keeps its share of them. With other rows it
        has no row order and no id map, and nothing is known of its lookups by id. The values are not checked."""
        size: dict[str, Any] = {"rows": rows, "dim": dim, "pooling_factor": pooling_factor}
        if self.access is not None and (rows, pooling_factor) != (self.rows, self.pooling_factor):
            lookups = pooling_factor / self.pooling_factor if self.pooling_factor else 0.0
            size["access"] = self.access.of_rows(rows / self.rows, lookups)
        if rows != self.rows:
            size |= {"row_order": None, "lookups_by_id": (), "id_map": None}
        if not self.features or pooling_factor == self.pooling_factor:
            return self.model_copy(update=size)
        share = pooling_factor / self.pooling_factor if self.pooling_factor else 0.0
        features = (one.model_copy(update={"pooling_factor": one.pooling_factor * share}) for one in self.features)
        return self.model_copy(update={**size, "features": tuple(features)})

    def hottest_share(self, rows: int) -> float:
        """The share of the lookups that the `rows` hottest rows have: by the access curve, else as the row order says."""
        if self.access is not None and self.access.lookups:
            return min(self.access.split(rows)[0].lookups / self.access.lookups, 1.0)
        return rows / self.rows if self.row_order is None else self.row_order.share_of(rows)

    def ordered_share(self, rows: int) -> float:
        """The share of the lookups that the `rows` hottest rows of its order have: as the order says, and no more than as many
        rows can have by the access curve. The table has an order."""
        assert self.row_order is not None
        return min(self.row_order.share_of(rows), self.hottest_share(rows))

    def lookup_share(self, first: int, rows: int) -> float | None:
        """The share of the lookups that `rows` ids from `first` on have, where it is known: by counts of ranges of ids, or where
        ids are in the order of access already. None where all rows are taken to be looked up alike."""
        if rows == self.rows:
            return None
        if shares := self.lookups_by_id:
            begin, end = (id_ * len(shares) / self.rows for id_ in (first, first + rows))
            pieces = (
                shares[at] * (min(end, at + 1) - max(begin, at))
                for at in range(int(begin), min(math.ceil(end), len(shares)))
            )
            return min(math.fsum(pieces), 1.0)
        if self.row_order is not None and not self.row_order.ids_digest:
            return max(self._share_below(first + rows) - self._share_below(first), 0.0)
        return None

    @property
    def knows_ids(self) -> bool:
        """Whether it is known what lookups some of its ids have (`lookup_share`)."""
        return self.rows > 1 and self.lookup_share(0, 1) is not None

    @property
    def loads(self) -> Loads | None:
        """The share of the lookups of each of its rows, by its access curve; None where it has none, or is never read."""
        if self.access is None or not self.access.lookups:
            return None
        lookups = self.access.lookups
        groups = zip(self.access.group_rows, self.access.lookups_per_row, strict=True)
        return Loads(self.rows, tuple((rows, each / lookups) for rows, each in groups))

    def _share_below(self, id_: int) -> float:
        """The share of lookups of the ids below, where the first are listed by a row order as they are: others are alike."""
        listed = self.row_order.hot_rows if self.row_order is not None else 0
        if id_ <= listed:
            return self.hottest_share(id_)
        return 1 - (1 - self.hottest_share(listed)) * (self.rows - id_) / (self.rows - listed)

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
        """Rows of the first of these blocks, the largest."""
        return -(-self.rows // devices)

    @property
    def memory_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.rows * sum(self.row_bytes(self.dim))

    def row_bytes(self, dim: int, optimizer: str | None = None) -> tuple[int, int]:
        """Bytes of `dim` columns of a row: weights, and the state of this optimizer, by default the table's."""
        per_row, per_element = self.optimizer_bytes_per_row, self.optimizer_bytes_per_element
        if optimizer is not None:
            per_row, per_element = OPTIMIZER_BYTES[optimizer]
        return dim * self.element_bytes, dim * per_element + per_row


def _of_one_line(name: str) -> str:
    # messages and reports are made of lines, and a terminal obeys control characters, also those beyond ASCII
    if any(char < " " or "\x7f" <= char < "\xa0" or char in "\u2028\u2029" for char in name):
        raise ValueError(f"must have no line breaks or control characters, not {name!r:.80}")
    return name


def _with_bins(data: dict[str, Any], rows: int, pooling_factor: float, batch_size: int) -> dict[str, Any]:
    """The same fields, with an access curve in place of its name, and with the curve's reuse bins where there are none."""
    access = data.get("access")
    if isinstance(access, str):
        try:
            exponent, shift = access_law(access)
        except UsageError as error:
            raise ValueError(f"access: {error}") from None
        data = {**data, "access": stated_curve(access, rows, pooling_factor, batch_size)}
        bins = zipf_bins(rows, pooling_factor, exponent, batch_size, shift) if exponent else None
    else:
        try:
            bins = None if access is None else AccessCurve.model_validate(access).reuse_bins(batch_size)
        except ValidationError:
            bins = (0.0,) * REUSE_BINS  # the field's own check says what is wrong
    if data.get("reuse_bins") is not None:
        return data
    return {**data, "reuse_bins": uniform_bins(rows, pooling_factor, batch_size) if bins is None else bins}


def _check_access(access: AccessCurve, rows: int, pooling_factor: float) -> None:
    """Raise ValueError where an access curve is not one of a table with these rows and lookups a sample."""
    if access.rows > rows * (1 + LOOSE):
        raise ValueError(
            f"access has {access.rows:,.0f} rows that are read, but the table has {rows:,}; leave access out, or count it again"
        )
    if access.stream is not None:
        for what, counted in (("cached", access.stream.cached_rows[-1]), ("distinct", access.stream.distinct_rows)):
            if counted > rows * (1 + LOOSE):
                raise ValueError(f"access counts {counted:,.0f} {what} rows, but the table has {rows:,} rows")
    a_sample = access.lookups / access.batch_size
    if not math.isclose(a_sample, pooling_factor, rel_tol=AGREEING, abs_tol=1e-9):
        raise ValueError(
            f"access counts {a_sample:.4g} lookups a sample, but pooling_factor is {pooling_factor:.4g}; make them agree, or "
            "leave access out"
        )


def _with_pooling_factor_of_features(data: dict[str, Any]) -> dict[str, Any]:
    """The same fields, with the sum of the features' lookups as `pooling_factor` where there is none."""
    features = data.get("features")
    if data.get("pooling_factor") is not None or not isinstance(features, list | tuple) or not features:
        return data
    each = [f.get("pooling_factor") if isinstance(f, dict) else getattr(f, "pooling_factor", None) for f in features]
    # where one is invalid, its own check has the better message
    numbers = [one for one in each if isinstance(one, int | float)]
    return {**data, "pooling_factor": math.fsum(numbers)}


def _as_read(tables: Any) -> Any:
    return (
        [one.model_dump() if isinstance(one, Table) else one for one in tables]
        if isinstance(tables, tuple | list)
        else tables
    )


# What is made of tables holds them as their file gives them back: a copy that was made in memory (model_copy) is not checked
Tables = Annotated[tuple[Table, ...], BeforeValidator(_as_read)]


def read_back(tables: Iterable[Table]) -> tuple[Table, ...]:
    """The tables as their file gives them back. Raises InvalidInput where it would not."""
    return tuple(Table.parse(table.model_dump(), f"table {shown(table.name)}") for table in tables)


def check_distinct(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """Raise ValueError unless there is at least one table, and no name twice."""
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
