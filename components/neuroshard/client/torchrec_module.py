"""Checks of a plan against a model's embedding collections. Needs torch and torchrec."""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Shard, device_memory, shard_memory
from neuroshard.core.shapes import difference, shapes_of
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.files.importers.torchrec_collections import find_collections
from neuroshard.files.importers.torchrec_tables import configs_of

DIVIDED = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)  # sharding types whose sums the collection divides at the end, for mean pooling


Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


class ShardingWarning(UserWarning):
    """The plan can be used, but something about it may surprise."""


class TablePlace(NamedTuple):
    """Where a table of a plan is in the model."""

    path: str  # of the module, as TorchRec's plan wants it
    config: EmbeddingBagConfig | EmbeddingConfig
    weighted: bool

    @property
    def pooling(self) -> str:
        """sum, mean, or none for a sequence."""
        return self.config.pooling.name.lower() if isinstance(self.config, EmbeddingBagConfig) else "none"

    @property
    def features(self) -> int:
        return max(len(self.config.feature_names), 1)


def collections_of(module: nn.Module) -> dict[str, Collection]:
    """The collections of a model, by path. Raises InvalidInput without one, and for a module with tables that no plan covers."""
    found = find_collections(module)
    every = {**found.pooled, **found.sequences}
    if not every:
        raise InvalidInput(
            f"the {type(module).__name__} has no EmbeddingBagCollection and no EmbeddingCollection in it to shard"
        )
    return every


def match_tables(tables: Sequence[Table], collections: Mapping[str, Collection], whose: str) -> dict[str, TablePlace]:
    """Where each of the tables is in the model, by its name.

    A table is the one of its name in its module, whose path in the model may have grown longer since. Where only one module of
    the model has a table of that name, it is that one, whatever the path. Raises InvalidInput unless each table of one side is
    one of the other, of the same shape and element size. Warns of tables that the model reads in another way than the plan
    assumed.
    """
    there: dict[str, list[TablePlace]] = {}
    for path, collection in collections.items():
        weighted = isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
        for config in configs_of(collection):
            there.setdefault(config.name, []).append(TablePlace(path, config, weighted))
    places: dict[str, TablePlace] = {}
    for table in tables:
        if (place := _place_of(table, there, whose)) is not None:
            places[table.name] = place
    _check_shapes(tables, places, there, whose)
    _check_how_read(tables, places, whose)
    return places


def _place_of(table: Table, there: Mapping[str, Sequence[TablePlace]], whose: str) -> TablePlace | None:
    """The place of one table, None if the model has none of its name. Raises InvalidInput where it may be several."""
    same_name = there.get(table.name_in_module) or there.get(table.name) or ()
    exact = [place for place in same_name if table.module and place.path == table.module]
    below = [place for place in same_name if table.module and f".{place.path}".endswith(f".{table.module}")]
    for found in (exact, below, same_name):
        if len(found) == 1:
            return found[0]
    if same_name:
        paths = " and in ".join(repr(place.path) for place in same_name[:2])
        raise InvalidInput(
            f"table {table.name_in_module!r} is in module {paths}, and {whose} has it "
            + (f"in module {table.module!r}" if table.module else "without a module")
            + "; make the tables from this model (neuroshard tables --from-torchrec), which says the modules"
        )
    return None


def _check_shapes(
    tables: Sequence[Table], places: Mapping[str, TablePlace], there: Mapping[str, Sequence[TablePlace]], whose: str
) -> None:
    """Raise InvalidInput unless both sides have the same tables, of the same shapes and element sizes."""
    shapes = {name: (place.config.num_embeddings, place.config.embedding_dim) for name, place in places.items()}
    taken: dict[tuple[str, str], str] = {}
    for name, place in places.items():
        if (other := taken.setdefault((place.path, place.config.name), name)) != name:
            raise InvalidInput(
                f"tables {other!r} and {name!r} of {whose} are both table {place.config.name!r} of module {place.path!r}; make "
                "the tables from this model (neuroshard tables --from-torchrec)"
            )
    for name, of_name in there.items():
        for place in of_name:
            if (place.path, name) not in taken:
                full = name if len(of_name) == 1 else f"{place.path}.{name}"
                shapes[full] = (place.config.num_embeddings, place.config.embedding_dim)
    if fault := difference(shapes_of(tables), shapes):
        raise InvalidInput(f"{whose} {fault}; search a plan for today's tables")
    for table in tables:
        path, config, _ = places[table.name]
        if DATA_TYPE_NUM_BITS.get(config.data_type) != 8 * table.element_bytes:
            raise InvalidInput(
                f"table {table.name!r} is {config.data_type.value} in module {path!r}, but {whose} is for "
                f"{table.element_bytes} bytes an element; search a plan for today's tables"
            )


def _check_how_read(tables: Sequence[Table], places: Mapping[str, TablePlace], whose: str) -> None:
    """Warn of tables whose pooling, weights or features differ from those that were priced."""
    otherwise = []
    for table in tables:
        place, features = places[table.name], max(len(table.features), 1)
        if (place.pooling, place.weighted) != (table.pooling, table.weighted):
            otherwise.append(
                f"table {table.name!r} is pooled by {place.pooling}{' with weights' * place.weighted} in module "
                f"{place.path!r}, but {whose} was searched for {table.pooling}{' with weights' * table.weighted}"
            )
        elif place.features != features:
            otherwise.append(
                f"table {table.name!r} is read by {counted(place.features, 'feature')} in module {place.path!r}, but {whose} was "
                f"searched for {features}"
            )
    if otherwise:
        more = f" (and {len(otherwise) - 1} more tables differ)" if len(otherwise) > 1 else ""
        warnings.warn(
            f"{otherwise[0]}{more}: it trains correctly, but its cost was predicted for other tables; say `pooling`, `weighted` "
            "and `features` in tables.json",
            ShardingWarning,
            stacklevel=4,
        )


def wrong_means(kinds: Mapping[str, str], places: Mapping[str, TablePlace]) -> tuple[str, str] | None:
    """What TorchRec 1.8 would compute wrongly for a mean-pooled table whose rows are split, and another way out than a plan that
    does not split them, both in words; None if all is right.

    Row-wise, the ranks sum up and the collection divides by the number of lookups at the end. But it then divides all its tables,
    also the table-wise and column-wise ones, which are complete already (`_create_mean_pooling_divisor`). In a grid, the operator
    takes the mean of each row block, and the ranks sum up these means (`pooling_type_to_pooling_mode`). `kinds` is the sharding
    type by table.
    """
    for path in dict.fromkeys(place.path for place in places.values()):
        here = {name: place for name, place in places.items() if place.path == path}
        means = [name for name, place in here.items() if place.pooling == "mean"]
        grids = [name for name in means if kinds[name] == ShardingType.GRID_SHARD.value]
        if grids:
            where = f"table {grids[0]!r} of module {path!r}"
            return f"{where} is pooled by mean and in a grid, where TorchRec adds up the means of blocks", ""
        divided = [name for name in means if kinds[name] in DIVIDED]
        others = [name for name in here if kinds[name] not in DIVIDED]
        if divided and others:
            return (
                f"table {divided[0]!r} of module {path!r} is pooled by mean and split row-wise, where TorchRec divides table "
                f"{others[0]!r}, which is not, by its lookups too",
                ", or the model must have it in another collection",
            )
    return None


def check_memory(plan: Plan, optimizer: str, whose: str) -> None:
    """Raise InvalidInput if a rank lacks memory for the weights, the state of this optimizer and what a step needs."""
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    update = {"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element}
    tables = tuple(table.model_copy(update=update) for table in plan.task.tables)
    task = plan.task.model_copy(update={"tables": tables})
    ranks = zip(device_memory(task, plan.shards), plan.task.usable_bytes, strict=True)
    for rank, (needed, limit) in enumerate(ranks):
        if needed.total > limit:
            shards = zip(shard_memory(task, plan.shards), plan.shards, strict=True)
            _, largest = max((memory.total, shard.table) for memory, shard in shards if shard.device == rank)
            raise InvalidInput(
                f"{whose}: rank {rank} needs {format_bytes(needed.total)} of {format_bytes(limit)} with the state of "
                f"{optimizer}, most of it for table {largest!r}; search a plan for tables that count it"
            )


def warn_of_split_state(shards: dict[str, list[Shard]], optimizer: str) -> None:
    """Warn of column splits with row-wise Adagrad: with a moment a row and shard, parts of a row learn at different rates."""
    split = [name for name, parts in shards.items() if len({part.column_offset for part in parts}) > 1]
    if optimizer == "rowwise_adagrad" and split:
        warnings.warn(
            f"{counted(len(split), 'table')} split column-wise ({split[0]!r} into {len(shards[split[0]])}): row-wise Adagrad "
            "keeps one moment per row and shard, so training differs from that of the unsplit tables; row-wise splits do "
            "not change training (search with --row-wise '*' --min-dim 65536)",
            ShardingWarning,
            stacklevel=3,
        )


def check_widths_of_sequences(
    shards: Mapping[str, list[Shard]], kinds: Mapping[str, str], places: Mapping[str, TablePlace], whose: str
) -> None:
    """Raise InvalidInput where column shards of a module's sequences on one rank are not equally wide: they are in one operator,
    and FBGEMM has none for unpooled rows of several widths."""
    widths: dict[tuple[str, int], tuple[str, int]] = {}
    for name, place in places.items():
        if place.pooling == "none" and kinds[name] == ShardingType.COLUMN_WISE.value:
            for shard in shards[name]:
                other, dim = widths.setdefault((place.path, shard.device), (name, shard.dim))
                if dim != shard.dim:
                    raise InvalidInput(
                        f"tables {other!r} and {name!r} of module {place.path!r} are sequences with shards of {dim} and "
                        f"{shard.dim} columns on rank {shard.device}, which no operator takes; {whose} must cut them equally"
                    )
