"""A collection whose tables are held by access: dealt over row blocks, or in a hot and a cold part. Needs torch and torchrec.

`CollectionByAccess` stands in the model where the collection was, takes the same features and returns the same outputs. Inside
is a collection of the parts as tables of their own, each read by features of its own (`f->t/hot`), so that TorchRec shards them
as any tables. What it does to a batch, for each feature of such a table:
- ids become rows of the parts (client/rows/map.py), and a part gets those that it holds;
- sequences: each part's rows go back to the places of their ids. Nothing is added, so nothing is rounded;
- pooled: the parts are sums, and their outputs are added; a mean is divided by the sample's whole number of lookups at the end.
  (Two means added up would be another value, without an error.)

Hot parts that are copied to every rank are in `copies` (client/rows/copies.py): TorchRec cannot train copied sequences.
client/rows/sharded.py shards it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table

from neuroshard.client.model.tables import Collection
from neuroshard.client.rows.copies import Copies
from neuroshard.client.rows.map import Part, RowMap
from neuroshard.core.errors import InvalidInput
from neuroshard.core.text import first_few
from neuroshard.files.importers.table_access import as_keyed
from neuroshard.files.importers.torchrec_collections import weight_of
from neuroshard.files.importers.torchrec_tables import configs_of

Config: TypeAlias = EmbeddingBagConfig | EmbeddingConfig
OPTIMIZER_ATTRIBUTES = ("_optimizer_classes", "_optimizer_kwargs")  # of apply_optimizer_in_backward


@dataclass(frozen=True, eq=False)
class TableRows:
    """How the rows of one table are held: its parts, its hot ids (None where ids are in order of access already), and the digest
    of these ids ("" then)."""

    parts: tuple[Part, ...]
    hot_ids: Tensor | None = None
    ids_digest: str = ""

    def name_of(self, table: str, part: Part) -> str:
        """The part's name as a table. It says the order and the blocks: a checkpoint of the parts as they are fits no others."""
        return f"{table}/{part.name}-{self.ids_digest[:8] or 'sorted'}-{part.blocks}"


class Reading(NamedTuple):
    """One feature of a table: the output that it makes, and the outputs inside by part (of tables held by access, features too),
    None for a copied one."""

    output: str
    feature: str
    table: str
    inside: tuple[str | None, ...]


class Joining(NamedTuple):
    """What one reading needs to make its output: lookups by sample, and by part the places of its lookups, None where all are
    its own. Of copied parts the rows to look up, and their weights."""

    reading: Reading
    lengths: Tensor
    ids: Tensor
    places: tuple[Tensor | None, ...]
    copied: tuple[tuple[Tensor, Tensor | None] | None, ...]

    def record_stream(self, stream: torch.Stream) -> None:
        of_copies = [tensor for pair in self.copied if pair for tensor in pair]
        for tensor in (self.lengths, self.ids, *self.places, *of_copies):
            if tensor is not None:
                tensor.record_stream(stream)


class Rows(nn.Module):
    """The tables of a collection that are held by access: what becomes of a batch's features, and of the outputs inside.

    Its only tensors are the maps of ids; it has no weights.
    """

    def __init__(self, configs: Mapping[str, Config], inside: Collection, held: Mapping[str, TableRows]) -> None:
        super().__init__()
        self.configs = dict(configs)
        self.held = {table: replace(rows, hot_ids=None) for table, rows in held.items()}  # the maps have what is needed
        self.maps = nn.ModuleDict(
            {table: RowMap(table, configs[table].num_embeddings, rows.hot_ids) for table, rows in held.items()}
        )
        self.readings = list(_readings(list(configs.values()), list(configs_of(inside)), held))
        self.means = [table for table in held if getattr(configs[table], "pooling", None) is PoolingType.MEAN]
        self.plain = list(dict.fromkeys(each.feature for each in self.readings if each.table not in held))
        self.pooled = isinstance(inside, EmbeddingBagCollection)
        self.needs_indices = isinstance(inside, EmbeddingCollection) and inside.need_indices()

    def ids_of(self, table: str, part: Part, rows: Tensor) -> Tensor:
        """The ids that these rows of a part hold."""
        return self.map_of(table).ids_of(part.ranks_of(rows))

    def map_of(self, table: str) -> RowMap:
        return cast(RowMap, self.maps[table])

    @property
    def output_names(self) -> list[str]:
        """The keys of the output, in order."""
        return [each.output for each in self.readings]

    def split(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[Joining]]:
        """The features of the collection inside, and what is needed to join its outputs. A TensorDict is taken too."""
        features = cast(KeyedJaggedTensor, as_keyed(features))
        if features.variable_stride_per_key():
            raise InvalidInput(
                "features have batch sizes of their own (stride_per_key_per_rank), and tables held by access cannot be read so; "
                "search a plan without rows by access"
            )
        weighted = features.weights_or_none() is not None
        if weighted and self.means:
            raise InvalidInput(
                f"the batch has weights, and table {self.means[0]!r}, which is pooled by mean and held by access, is not "
                "weighted: TorchRec would weigh its rows, and its parts otherwise; give the batch no weights"
            )
        with torch.no_grad():
            given = dict(_features(features))
            for reading in self.readings:
                if reading.feature not in given:
                    raise InvalidInput(
                        f"the batch has no feature {reading.feature!r}, which table {reading.table!r} reads; it has "
                        f"{first_few(list(given))}"
                    )
            new = {name: given[name] for name in self.plain}
            joinings = []
            for reading in self.readings:
                if reading.table in self.held:
                    joinings.append(self._split(reading, given[reading.feature], new))
            inside = KeyedJaggedTensor(
                keys=list(new),
                values=torch.cat([each.ids for each in new.values()]),
                lengths=torch.cat([each.lengths for each in new.values()]),
                weights=torch.cat([cast(Tensor, each.weights) for each in new.values()]) if weighted else None,
                stride=features.stride(),
            )
        return inside, joinings

    def _split(self, reading: Reading, given: "_Feature", new: "dict[str, _Feature]") -> Joining:
        """Put what the parts of a table read into `new`. Ids that the table lacks go to its last part as they are, which has
        fewer rows than the table, so they are outside of it too."""
        parts = self.held[reading.table].parts
        ranks, there = self.map_of(reading.table).ranks(given.ids)
        if len(parts) == 1:
            rows = torch.where(there, parts[0].held_in(ranks), given.ids)
            new[cast(str, reading.inside[0])] = _Feature(rows, given.lengths, given.weights)
            return Joining(reading, given.lengths, given.ids, (None,), (None,))
        hot = there & (ranks < parts[0].rows)
        offsets = nn.functional.pad(given.lengths.cumsum(0), (1, 0))
        hot_before = nn.functional.pad(hot.cumsum(0), (1, 0))[offsets]
        lengths = hot_before.diff().to(given.lengths.dtype)
        places, copied = [], []
        for part, mask, name, own in zip(
            parts, (hot, ~hot), reading.inside, (lengths, given.lengths - lengths), strict=True
        ):
            at = mask.nonzero().squeeze(1)
            rows = ranks[at]
            rows = torch.where(there[at], part.held_in(rows), rows) if part is parts[-1] else part.held_in(rows)
            weights = None if given.weights is None else given.weights[at]
            if name is not None:
                new[name] = _Feature(rows, own, weights)
            places.append(at)
            copied.append((rows, weights) if name is None else None)
        return Joining(reading, given.lengths, given.ids, tuple(places), tuple(copied))

    def look_up(self, joinings: Sequence[Joining], copies: Copies) -> list[Tensor]:
        """The rows of copied parts that a batch reads, in the order of the joinings: this rank's own copies, as they are now."""
        asked = [
            (self.held[each.reading.table].name_of(each.reading.table, part), pair[0])
            for each in joinings
            for part, pair in zip(self.held[each.reading.table].parts, each.copied, strict=True)
            if pair is not None
        ]
        return list(copies(asked)) if asked else []

    def join(
        self, output: KeyedTensor | dict[str, JaggedTensor], joinings: Sequence[Joining], looked_up: Sequence[Tensor]
    ) -> KeyedTensor | dict[str, JaggedTensor]:
        """The output of the collection as it was, of that of the collection inside."""
        by_name = output.to_dict() if isinstance(output, KeyedTensor) else output
        by_reading, copies = {each.reading: each for each in joinings}, iter(looked_up)
        joined: dict[str, Any] = {}
        for reading in self.readings:
            if (joining := by_reading.get(reading)) is None:
                joined[reading.output] = by_name[str(reading.inside[0])]
            elif self.pooled:
                joined[reading.output] = self._added(joining, by_name, copies)
            else:
                joined[reading.output] = self._put_back(joining, by_name, copies)
        if not self.pooled:
            return joined
        return KeyedTensor(
            list(joined), [each.shape[1] for each in joined.values()], torch.cat(list(joined.values()), 1)
        )

    def _added(self, joining: Joining, output: Mapping[str, Tensor], copies: Iterator[Tensor]) -> Tensor:
        """The sum, or mean, of each sample of one feature."""
        reading, lengths = joining.reading, joining.lengths
        if len(reading.inside) == 1:
            return output[str(reading.inside[0])]
        total: Tensor | None = None
        for name, copied, places in zip(reading.inside, joining.copied, joining.places, strict=True):
            if name is not None:
                of_part = output[name]
            else:
                rows, weights = next(copies), cast(tuple[Tensor, Tensor | None], copied)[1]
                rows = rows if weights is None else rows * weights.unsqueeze(1)
                sample = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)[places]
                of_part = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, sample, rows)
            total = of_part if total is None else total + of_part
        config = cast(EmbeddingBagConfig, self.configs[reading.table])
        mean = config.pooling is PoolingType.MEAN
        return cast(Tensor, total) / lengths.clamp(min=1).unsqueeze(1) if mean else cast(Tensor, total)

    def _put_back(self, joining: Joining, output: Mapping[str, JaggedTensor], copies: Iterator[Tensor]) -> JaggedTensor:
        """The rows of one feature's ids, in their places."""
        reading, ids = joining.reading, joining.ids
        if len(reading.inside) == 1:
            values = output[str(reading.inside[0])].values()
        else:
            rows = [next(copies) if name is None else output[name].values() for name in reading.inside]
            values = rows[-1].new_zeros(len(ids), rows[-1].shape[1])
            for places, of_part in zip(joining.places, rows, strict=True):
                values = values.index_copy(0, cast(Tensor, places), of_part.to(values.dtype))
        return JaggedTensor(values, lengths=joining.lengths, weights=ids if self.needs_indices else None)


class CollectionByAccess(nn.Module):
    """`collection` with the tables of `held` (by their names in it, in parts that have all of their rows) held by access. It
    takes over the weights.

    Raises InvalidInput, which names the table, for a row order of another table, and for means with weights.
    """

    def __init__(self, collection: Collection, held: Mapping[str, TableRows]) -> None:
        super().__init__()
        configs: dict[str, Config] = {config.name: config for config in configs_of(collection)}
        means = [table for table in held if getattr(configs[table], "pooling", None) is PoolingType.MEAN]
        if means and isinstance(collection, EmbeddingBagCollection) and collection.is_weighted():
            raise InvalidInput(
                f"table {means[0]!r} is pooled by mean with weights, which TorchRec divides by their sum or by the lookups, as "
                "rows are split: it cannot be held by access; pool by sum, and divide the weights"
            )
        self.inner, self.copies = _parted(collection, configs, held), Copies()
        self.rows = Rows(configs, self.inner, held)
        self.names_in_plan = {
            rows.name_of(table, part): table if len(rows.parts) == 1 else f"{table}/{part.name}"
            for table, rows in held.items()
            for part in rows.parts
        }
        self.inner.names_in_plan = self.names_in_plan  # for match_tables, which sees the collection inside
        for table, config in configs.items():
            self._take_over(table, config, weight_of(collection, table))

    def _take_over(self, table: str, config: Config, weight: nn.Parameter) -> None:
        """Give the parts of a table its weights, and what says how they are trained."""
        if table not in self.rows.held:
            _holders(self.inner)[table].weight = weight
            return
        held = self.rows.held[table]
        for part in held.parts:
            name, given = held.name_of(table, part), weight[: part.rows]
            if not weight.is_meta:
                given = weight[self.rows.ids_of(table, part, torch.arange(part.rows, device=weight.device))]
            own = nn.Parameter(given.detach().clone(), requires_grad=weight.requires_grad)
            for attribute in OPTIMIZER_ATTRIBUTES:
                if hasattr(weight, attribute):
                    setattr(own, attribute, getattr(weight, attribute))
            if part.copied:
                self.copies.add(name, config, own)
            else:
                _holders(self.inner)[name].weight = own

    @property
    def output_names(self) -> list[str]:
        """The keys of the output, in order."""
        return self.rows.output_names

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        inside, joinings = self.rows.split(features)
        return self.rows.join(self.inner(inside), joinings, self.rows.look_up(joinings, self.copies))


class _Feature(NamedTuple):
    ids: Tensor
    lengths: Tensor
    weights: Tensor | None


def _features(features: KeyedJaggedTensor) -> Iterator[tuple[str, _Feature]]:
    """Each feature of a batch, by name."""
    offsets, weights = features.offset_per_key(), features.weights_or_none()
    by_feature = features.lengths().view(len(features.keys()), features.stride())
    for key, lengths, (first, end) in zip(features.keys(), by_feature, pairwise(offsets), strict=True):
        yield key, _Feature(features.values()[first:end], lengths, None if weights is None else weights[first:end])


def _readings(configs: list[Config], inside: list[Config], held: Mapping[str, TableRows]) -> Iterator[Reading]:
    """What the features of a collection read, in the order of its outputs. Where several tables inside read a feature, TorchRec
    names the outputs otherwise than the features; features of parts are read by one each."""
    outputs_inside = {
        (config.name, feature): output
        for config, outputs in zip(inside, get_embedding_names_by_table(inside), strict=True)
        for feature, output in zip(config.feature_names, outputs, strict=True)
    }
    for config, outputs in zip(configs, get_embedding_names_by_table(configs), strict=True):
        for feature, output in zip(config.feature_names, outputs, strict=True):
            if config.name in held:
                names = [None if p.copied else _inside(feature, config.name, p) for p in held[config.name].parts]
            else:
                names = [outputs_inside[config.name, feature]]
            yield Reading(output, feature, config.name, tuple(names))


def _inside(feature: str, table: str, part: Part) -> str:
    """The feature that reads what a part holds of another feature's ids. It has no "@", at which TorchRec cuts names of features
    where it divides means."""
    return f"{feature}->{table}/{part.name}"


def _parted(collection: Collection, configs: Mapping[str, Config], held: Mapping[str, TableRows]) -> Collection:
    """A collection of the parts, without weights yet."""
    tables: list[Any] = []
    for table, config in configs.items():
        if table not in held:
            tables.append(replace(config))
            continue
        rows = held[table]
        for part in rows.parts:
            if part.copied:
                continue
            own = replace(
                config,  # with its init_fn, whose range is that of the whole table
                name=rows.name_of(table, part),
                num_embeddings=part.rows,
                feature_names=[_inside(feature, table, part) for feature in config.feature_names],
            )
            if isinstance(own, EmbeddingBagConfig) and len(rows.parts) > 1:
                own.pooling = PoolingType.SUM
            tables.append(own)
    meta = torch.device("meta")  # weights are put in by the caller
    if isinstance(collection, EmbeddingBagCollection):
        made: Collection = EmbeddingBagCollection(tables, is_weighted=collection.is_weighted(), device=meta)
    else:
        made = EmbeddingCollection(tables, device=meta, need_indices=collection.need_indices())
    made._device = collection.device
    return made


def _holders(collection: Collection) -> nn.ModuleDict:
    pooled = isinstance(collection, EmbeddingBagCollection)
    return cast(nn.ModuleDict, collection.embedding_bags if pooled else collection.embeddings)
