"""Tables that give rows to ids as they train (managed collisions): what a trainer must know. Needs torch and torchrec.

Seen with torchrec 1.8 on gloo: sharded at the wrapper's path each id has one row, whatever rank looks it up, and losses are those
of the whole table with these rows. What differs from a table without an id map:
- ids go to ranks in blocks of the hash space. Without a hash function small ids are all in the first block: other ranks' rows
  are never used;
- the state of a row that goes to another id is set back for SGD, which has none, and row-wise Adagrad only;
- on CPUs FBGEMM (1.8) cannot set back row-wise Adagrad's (`reset_weight_momentum`), nor give rows to new ids in
  HashZchManagedCollisionModule (`zero_collision_hash`): the first step that needs it fails.
"""

from typing import Any

from neuroshard.client.model.warn import warn, warn_of
from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.id_map import SORTED
from neuroshard.core.tiers import TIERS
from neuroshard.files.importers.torchrec_tables import id_map

# optimizers whose state `reset_embedding_weight_momentum` of FBGEMM sets back, or that have none
SET_BACK = ("sgd", "rowwise_adagrad")


def check_id_maps(priced: Priced, compute_kernel: str | None) -> None:
    """Raise InvalidInput for what FBGEMM's CPU operators lack, and UsageError for a kernel that caches such tables."""
    on_cpus = priced.device_type == "cpu"
    for name, place in priced.places.items():
        if (known := id_map(priced.collections[place.path], place.config)) is None:
            continue
        where = f"{place.where} gives rows to ids as it trains"
        if compute_kernel == TIERS["cached"].kernel:
            raise UsageError(
                f"{where}, and TorchRec sets the rows of new ids in host memory, where the cache of compute_kernel "
                f"{compute_kernel!r} does not see it; leave it out"
            )
        if on_cpus and known.kind != SORTED:
            raise InvalidInput(
                f"{where} with HashZchManagedCollisionModule, and FBGEMM's CPU operator finds rows but gives none to new ids; "
                "train on GPUs, or take MCHManagedCollisionModule"
            )
        if on_cpus and priced.optimizers.get(name) == "rowwise_adagrad":
            raise InvalidInput(
                f"{where}, and FBGEMM cannot set back rowwise_adagrad's state of a row on CPUs; train on GPUs, or with sgd"
            )


def warn_of_id_maps(priced: Priced) -> None:
    """Warn, in a line each, of id maps that leave ranks without ids, of rows whose new ids get moments of others, and of what no
    plan is priced for."""
    optimizers, collections, ranks = priced.optimizers, priced.collections, priced.plan.task.devices
    unhashed, kept = [], dict[str, list[str]]()
    for name, place in priced.places.items():
        if (known := id_map(collections[place.path], place.config)) is None:
            continue
        collection: Any = collections[place.path]
        module = collection._managed_collision_collection._managed_collision_modules[place.config.name]
        hashed = module._input_hash_func is not None if known.kind == SORTED else module.input_size() == 0
        unhashed += [] if hashed else [place.where]
        if optimizers.get(name, "sgd") not in SET_BACK:
            kept.setdefault(optimizers[name], []).append(place.where)
    for path in dict.fromkeys(place.path for place in priced.places.values()):
        if getattr(collections[path], "_return_remapped_features", False):
            warn(
                f"module {path!r} has return_remapped_features, for which TorchRec runs an all-to-all more in a step than the "
                "plan was priced for; leave it out where nothing reads them"
            )
    if ranks > 1:
        warn_of(
            unhashed,
            f": its ids go to {ranks} ranks in blocks of input_hash_size, and are not hashed: small ids all go "
            "to rank 0, and other ranks' rows are never used; give it an input_hash_func that spreads ids over input_hash_size",
        )
    for optimizer, tables in kept.items():
        warn_of(
            tables,
            ": where a row goes to another id, TorchRec sets the row's weights back, but not its state of "
            f"{optimizer}, so the new id begins with moments of the old one; with rowwise_adagrad it sets back both",
        )
