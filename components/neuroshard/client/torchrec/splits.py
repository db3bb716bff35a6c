"""What TorchRec computes wrongly, or fails on, of tables that are split. Needs torch and torchrec."""

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from neuroshard.client.model.tables import TablePlace
from neuroshard.client.model.warn import warn_of
from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Shard
from neuroshard.core.sharding import Sharding


def wrong_means(priced: Priced) -> tuple[str, str] | None:
    """What TorchRec 1.8 would compute wrongly for a mean-pooled table whose rows are split, and another way out than a plan that
    does not split them, both in words; None if all is right.

    Row-wise, the ranks sum up and the collection divides by the number of lookups at the end. But it then divides all its tables,
    also the table-wise and column-wise ones, which are complete already (`_create_mean_pooling_divisor`). It leaves out sums by
    feature, and only where the feature comes first: of two tables that read it, a sum is divided, or a mean is not. With weights
    it divides by their sum, where whole tables are divided by the number of lookups. In a grid, the operator takes the mean of
    each row block, and the ranks sum up these means (`pooling_type_to_pooling_mode`).
    """
    kinds, places = priced.kinds, priced.places
    elsewhere = ", or the model must have it in another collection"
    for path in dict.fromkeys(place.path for place in places.values()):
        here = {name: place for name, place in places.items() if place.path == path}
        means = [name for name, place in here.items() if place.pooling == "mean"]
        added_up = [name for name in means if kinds[name].splits_rows and not kinds[name].divides_means]
        if added_up:
            return (
                f"table {added_up[0]!r} of module {path!r} is pooled by mean and in a grid, where TorchRec adds up the means of "
                "blocks",
                "",
            )
        divided = [name for name in means if kinds[name].divides_means]
        if not divided:
            continue
        what = f"table {divided[0]!r} of module {path!r} is pooled by mean and split row-wise, where TorchRec divides"
        if here[divided[0]].weighted:
            return f"{what} by the sum of its weights, and those of whole tables by their number", ""
        if others := [name for name in here if not kinds[name].divides_means]:
            return f"{what} table {others[0]!r}, which is not, by its lookups too", elsewhere
        if shared := _shared_sum(here):
            feature, first, second = shared
            return (
                f"{what} tables {first!r} and {second!r} wrongly: both read feature {feature!r}, and not both are means",
                elsewhere,
            )
    return None


def _shared_sum(places: Mapping[str, TablePlace]) -> tuple[str, str, str] | None:
    """A feature that a table pooled by sum reads and another table too, and two tables that read it."""
    readers: dict[str, list[str]] = {}
    for name, place in places.items():
        for feature in place.config.feature_names:
            readers.setdefault(feature, []).append(name)
    for feature, names in readers.items():
        if len(names) > 1 and any(places[name].pooling == "sum" for name in names):
            return feature, names[0], names[1]
    return None


def check_processors(priced: Priced) -> None:
    """Raise InvalidInput for row splits with which TorchRec's feature processors fail, and warn of those with which processors of
    a user's own may compute other values (seen with torchrec 1.8).

    Where rows are split, TorchRec applies processors to each rank's part of a bag. Those with a `pre_process_input`, as
    TorchRec's position weights, get the whole bags before. In a dict of processors, a feature that comes twice in a rank's input
    gets the weights of the second part both times.
    """
    kinds, places = priced.kinds, priced.places
    unaware = defaultdict[str, list[str]](list)  # tables, by class of the processor
    for path in dict.fromkeys(place.path for place in places.values()):
        processors = getattr(priced.module.get_submodule(path), "_feature_processors", None)
        split = {name: place for name, place in places.items() if place.path == path and kinds[name].splits_rows}
        if processors is None or not split:
            continue
        by_feature = processors if isinstance(processors, nn.ModuleDict) else None
        if by_feature is not None and (twice := _other_blocks(split, priced)):
            feature, first, other, rank = twice
            raise InvalidInput(
                f"tables {first!r} and {other!r} of module {path!r} both read feature {feature!r}, and have other row blocks on "
                f"rank {rank}, where TorchRec gives both the weights of one; give the module a PositionWeightedModuleCollection "
                f"in place of a dict, or {priced.whose} must not split the rows of both"
            )
        for name, place in split.items():
            used = (
                [processors]
                if by_feature is None
                else [by_feature[f] for f in place.config.feature_names if f in by_feature]
            )
            for kind in {type(one).__name__ for one in used if not hasattr(one, "pre_process_input")}:
                unaware[kind].append(f"table {name!r} of module {path!r}")
    for kind, tables in unaware.items():
        warn_of(
            tables,
            f": split row-wise, where TorchRec gives {kind} each rank's part of a bag, with rows as they are numbered there: it "
            "has no pre_process_input, which sees whole bags before, so it computes other values than in the model unless it "
            "looks at each weight alone; search with --no-row-wise",
        )


def _other_blocks(split: Mapping[str, TablePlace], priced: Priced) -> tuple[str, str, str, int] | None:
    """A feature that two tables of one operator read whose row blocks on a rank differ, the tables, and the rank."""
    first: dict[tuple[str, Sharding, int], tuple[str, tuple[int, int]]] = {}
    for name, place in split.items():
        for shard in priced.shards[name]:
            block = shard.row_offset, shard.rows
            for feature in place.config.feature_names:
                other, there = first.setdefault((feature, priced.kinds[name], shard.device), (name, block))
                if there != block:
                    return feature, other, name, shard.device
    return None


def check_sequences(priced: Priced) -> None:
    """Raise InvalidInput for sequences whose rows are split over a part of the ranks, and where column shards of a module's
    sequences are not equally wide, on whatever ranks: TorchRec has no such sharding of sequences, and takes all ranks' rows to
    be of one width (1.8: a rank fails, and the others wait for it)."""
    kinds, whose = priced.kinds, priced.whose
    widths: dict[str, tuple[str, Shard]] = {}
    for name, place in priced.places.items():
        if place.pooling == "none" and kinds[name].over_domains:  # TorchRec raises without the table
            raise InvalidInput(
                f"table {name!r} of module {place.path!r} is a sequence, and TorchRec has no {kinds[name].torchrec} sharding for "
                f"sequences; {whose} must keep it whole, or split its columns or its rows over all ranks"
            )
        if place.pooling == "none" and kinds[name].splits_columns:
            for shard in priced.shards[name]:
                other, first = widths.setdefault(place.path, (name, shard))
                if first.dim != shard.dim:
                    both = f"table {name!r}" if other == name else f"tables {other!r} and {name!r}"
                    raise InvalidInput(
                        f"{both} of module {place.path!r}: sequences in shards of {first.dim} columns (rank {first.device}) and "
                        f"{shard.dim} (rank {shard.device}), which TorchRec cannot exchange; {whose} must cut all sequences of a "
                        "module equally"
                    )
