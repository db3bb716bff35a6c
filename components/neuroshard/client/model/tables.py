"""Checks of a plan against a model's embedding collections. Needs torch and torchrec."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from neuroshard.client.model.warn import warn, warn_of
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.shapes import difference, shapes_of
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing, counted
from neuroshard.core.value import shown
from neuroshard.files.importers.torchrec_collections import UNSEEN, find_collections, unseen_collections, weight_of
from neuroshard.files.importers.torchrec_collections import Collection as Collection
from neuroshard.files.importers.torchrec_tables import WEIGHTED_MEAN, configs_of, id_map, inner_of, is_weighted

META = torch.device("meta")
# of a module's calls, where torch keeps its hooks
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter, where torch keeps its own


class TablePlace(NamedTuple):
    """Where a table of a plan is in the model."""

    path: str  # of the module, as TorchRec's plan wants it
    config: EmbeddingBagConfig | EmbeddingConfig
    weighted: bool

    @property
    def where(self) -> str:
        return f"table {self.config.name!r} of module {self.path!r}"

    @property
    def pooling(self) -> str:
        """sum, mean, or none for a sequence."""
        return self.config.pooling.name.lower() if isinstance(self.config, EmbeddingBagConfig) else "none"

    @property
    def features(self) -> int:
        return max(len(self.config.feature_names), 1)


def check_module(module: object) -> None:
    """Raise UsageError for what is no module."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{shown(module)} is no torch.nn.Module; give the model itself, made on the meta device or another"
        )


def collections_of(module: nn.Module, *, by_access: bool = False) -> dict[str, Collection]:
    """The collections of a model, by path. Raises UsageError for what is no module, and InvalidInput for one without collections,
    with tables that no plan covers or, unless they may be, with tables held `by_access` already."""
    check_module(module)
    every: dict[str, Collection] = find_collections(module, by_access=by_access).all
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
    places = places_of(tables, collections, whose)
    _check_shapes(tables, places, _tables_by_name(collections), whose)
    _check_id_maps(tables, places, collections, whose)
    _check_how_read(tables, places, whose)
    return places


def places_of(tables: Sequence[Table], collections: Mapping[str, Collection], whose: str) -> dict[str, TablePlace]:
    """As `match_tables`, of tables that were matched before: nothing is checked or warned of."""
    there = _tables_by_name(collections)
    places = {table.name: _place_of(table, there, whose) for table in tables}
    return {name: place for name, place in places.items() if place is not None}


def _tables_by_name(collections: Mapping[str, Collection]) -> dict[str, list[TablePlace]]:
    there: dict[str, list[TablePlace]] = {}
    for path, collection in collections.items():
        weighted = is_weighted(collection)
        known_as = getattr(collection, "names_in_plan", {})  # of tables held by access (client/rows/)
        for config in configs_of(collection):
            there.setdefault(known_as.get(config.name, config.name), []).append(TablePlace(path, config, weighted))
    return there


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
            if (place.path, place.config.name) not in taken:
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


def _check_id_maps(
    tables: Sequence[Table], places: Mapping[str, TablePlace], collections: Mapping[str, Collection], whose: str
) -> None:
    """Raise InvalidInput where a table gives rows to ids as it trains on one side only, or otherwise: it can be held in one way
    only, and its memory depends on it."""
    for table in tables:
        place = places[table.name]
        here, there = id_map(collections[place.path], place.config), table.id_map
        if here == there:
            continue
        where = f"table {table.name!r} of module {place.path!r}"
        if here is None or there is None:
            has, lacks = ("the model", whose) if there is None else (whose, "the model")
            fault = f"{where} gives rows to ids as it trains in {has} (managed collisions), but not in {lacks}"
        else:
            name = next(one for one in type(here).model_fields if getattr(here, one) != getattr(there, one))
            fault = f"{where} has an id map of {name} {getattr(here, name)}, but {whose} counts {getattr(there, name)}"
        raise InvalidInput(f"{fault}; search a plan for this model's tables (neuroshard tables --from-torchrec)")


def _check_how_read(tables: Sequence[Table], places: Mapping[str, TablePlace], whose: str) -> None:
    """Warn of tables whose pooling, weights or features differ from those that were priced. Raises InvalidInput where one is a
    sequence on one side only: TorchRec cannot split it as the other."""
    otherwise = []
    for table in tables:
        place, features = places[table.name], max(len(table.features), 1)
        if "none" in (place.pooling, table.pooling) and place.pooling != table.pooling:
            is_, was = ("a sequence", "pooled") if place.pooling == "none" else ("pooled", "a sequence")
            raise InvalidInput(
                f"table {table.name!r} is {is_} in module {place.path!r}, but {was} in {whose} (`pooling` is {table.pooling}); "
                "search a plan for this model's tables (neuroshard tables --from-torchrec)"
            )
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
        more = f" (and {agreeing(len(otherwise) - 1, 'more table', 'differs', 'differ')})" if len(otherwise) > 1 else ""
        warn(
            f"{otherwise[0]}{more}: the plan can be used, but its cost was predicted for other tables; say `pooling`, `weighted` "
            "and `features` in tables.json"
        )


def warn_of_training(module: nn.Module, collections: Mapping[str, Collection]) -> None:
    """Warn of tables that TorchRec trains otherwise than the model says, or fails on, by any plan: those that torch does not see,
    frozen ones, means of weighted rows, those with hooks, those of another type than their config says, and those on the meta
    device whose collection says another."""
    warn_of(unseen_collections(module), f": {UNSEEN}")
    frozen, means, no_weights, hooked, cast = [], [], [], [], []
    for path, collection in collections.items():
        weighted = is_weighted(collection)
        if any(map(_has_hooks, {module.get_submodule(path), *collection.modules()})):
            hooked.append(f"module {path!r}")
        for config in configs_of(collection):
            where = f"table {config.name!r} of module {path!r}"
            weight = weight_of(collection, config.name)
            frozen += [where] if not weight.requires_grad else []
            no_weights += [where] if weight.is_meta and getattr(inner_of(collection), "device", META) != META else []
            cast += [where] if weight.dtype != data_type_to_dtype(config.data_type) else []
            means += [where] if weighted and config.pooling is PoolingType.MEAN else []
    warn_of(
        frozen,
        ": frozen (requires_grad is False), but TorchRec trains it, by any plan; let it require gradients, and give it a "
        "learning rate of 0 (apply_optimizer_in_backward)",
    )
    warn_of(means, f": {WEIGHTED_MEAN}")
    warn_of(
        cast,
        ": of another type in the model than its data_type says (.half(), .bfloat16(), .double(), .to()), which sharding undoes: "
        "TorchRec trains it as data_type; give the config data_type=DataType.FP16, or leave it as it is",
    )
    warn_of(
        hooked,
        ": hooks on the module, or on a table in it, are dropped by TorchRec, which puts a sharded module in its place, and "
        "never run; register those of the module after DistributedModelParallel (gradients of sharded tables reach none)",
    )
    warn_of(
        no_weights,
        ": on the meta device, though its collection says another: TorchRec copies its weights, and fails on the ranks that hold "
        "it; give the collection device=torch.device('meta')",
    )


def _has_hooks(module: nn.Module) -> bool:
    """Whether anyone has hung hooks on a module, on its calls or on the gradients of its own parameters."""
    own = module._parameters.values()
    on_weights = (getattr(each, name, None) for each in own for name in OF_GRADIENTS)
    return any((*on_weights, *(getattr(module, name) for name in HOOKS)))
