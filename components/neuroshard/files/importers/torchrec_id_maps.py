"""The id maps of a ManagedCollision(Embedding|EmbeddingBag)Collection: what each takes of its rank, and which no plan covers.

TorchRec (1.8, 1.9) rebuilds each module for the rows of its rank (`rebuild_with_output_id_range`), on the rank's device whatever
the table's kernel. Counted are its buffers and parameters, and what MCHManagedCollisionModule keeps of the ids since it last
evicted: 1.25 times what its first batches hold. Not counted is what a remap makes for a moment. Needs torch and torchrec.
"""

import warnings
from typing import Any

from neuroshard.core.errors import InvalidInput
from neuroshard.core.id_map import SORTED, IdMap

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of torchrec and FBGEMM while they are imported
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import (
        ManagedCollisionCollection,
        ManagedCollisionModule,
        MCHManagedCollisionModule,
    )

MAPPED = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
MANAGED_COLLISIONS = (ManagedCollisionCollection, ManagedCollisionModule)
ID_BYTES = 8  # of an id, or of what is remembered of it: all are int64
HISTORY = 1.25  # times the lookups of the first step, which MCHManagedCollisionModule has room for in each step until it evicts


def id_map_of(collection: Any, table: str) -> IdMap | None:
    """The id map of a table; None where its collection is of no managed collisions."""
    if type(collection) not in MAPPED:
        return None
    module: Any = collection._managed_collision_collection._managed_collision_modules[table]
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    of_rows = {name for name, value in held.items() if value.dim() and value.shape[0] == module.output_size()}
    of_rows = {name for name in of_rows if name.startswith(("_mch_", "_hash_zch_")) and name not in _OF_RANK}
    sizes = {name: value.numel() * value.element_size() for name, value in held.items()}
    per_row = sum(sizes[name] for name in of_rows) // module.output_size()
    per_rank = sum(size for name, size in sizes.items() if name not in of_rows)
    if type(module) is HashZchManagedCollisionModule:
        return IdMap(kind="mpzch", bytes_per_row=per_row, bytes_per_rank=per_rank, buckets=module.buckets())
    remembered = sum(info.is_history_metadata for info in module._eviction_policy.metadata_info)
    per_lookup = ID_BYTES * (1 + remembered) * HISTORY * module._eviction_interval
    return IdMap(kind=SORTED, bytes_per_row=per_row, bytes_per_lookup=per_lookup, bytes_per_rank=per_rank)


_OF_RANK = ("_mch_slots", "_hash_zch_bucket")  # one number, also of a table with one row


def check_mapped(collection: Any, path: str) -> None:
    """Raise InvalidInput for managed collisions that TorchRec maps or trains otherwise sharded than whole, without an error."""
    where = f"module {path!r} is a {type(collection).__name__}"
    inner, maps = collection._embedding_module, collection._managed_collision_collection
    for config in maps.embedding_configs():
        module = maps._managed_collision_modules[config.name]
        if type(module) not in (MCHManagedCollisionModule, HashZchManagedCollisionModule):
            raise InvalidInput(
                f"{where}, whose table {config.name!r} has a {type(module).__name__}; what it keeps is not known: take "
                "MCHManagedCollisionModule or HashZchManagedCollisionModule"
            )
    if getattr(inner, "is_weighted", bool)() and maps.need_preprocess:
        raise InvalidInput(
            f"{where}, and its lookups are weighted: TorchRec drops the weights where it hashes ids (need_preprocess); hash them "
            "in the input, and say need_preprocess=False"
        )
