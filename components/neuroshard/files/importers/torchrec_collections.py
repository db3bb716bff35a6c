"""Which modules of a TorchRec model a plan shards, at which paths, and which it must refuse; and the fused optimizers of its
tables. Needs torch and torchrec.

TorchRec picks a sharder by a module's exact class, and shards a module that wraps a collection at the wrapper's own path. A plan
for the path inside trains something else without an error (seen with torchrec 1.8): the position weights of a
FeatureProcessedEmbeddingBagCollection get no gradient, and with managed collisions every rank maps ids to rows of its own.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast

from torch import nn

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import OPTIMIZER_BYTES
from neuroshard.files.importers.torchrec_tables import INSIDE_MAPPED, check_config, configs_of, inner_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of torchrec and FBGEMM while they are imported
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollection,
        EmbeddingCollectionInterface,
    )
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
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


COVERED = (EmbeddingBagCollection, FeatureProcessedEmbeddingBagCollection, EmbeddingCollection, *MAPPED)
Collection: TypeAlias = (
    EmbeddingBagCollection
    | EmbeddingCollection
    | ManagedCollisionEmbeddingBagCollection
    | ManagedCollisionEmbeddingCollection
)
INTERFACES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
UNSEEN = (
    "in a plain list, tuple or dict, where TorchRec does not look: there it stays unsharded, and is neither planned nor trained; "
    "make that an nn.ModuleList or nn.ModuleDict"
)
# classes of torchrec that only hold other modules
CONTAINERS = ("torchrec.models.", "torchrec.modules.lazy_extension", "torchrec.modules.embedding_tower")


@dataclass(frozen=True)
class Collections:
    """What holds a model's tables, by the path at which TorchRec wants the plan; "" is the model itself."""

    pooled: dict[str, Collection] = field(default_factory=dict)
    sequences: dict[str, Collection] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, Collection]:
        """Both, pooled ones first."""
        return {**self.pooled, **self.sequences}


def find_collections(model: nn.Module, *, by_access: bool = False) -> Collections:
    """The collections of a model. A feature-processed one counts as pooled, at the path of its wrapper.

    Raises InvalidInput, which names module and class, for a module with tables that plans do not cover, for a collection
    that has two names in one module, of which TorchRec shards one, for a table whose weight is also another's, for a table
    that TorchRec cannot shard, and, unless they may be held `by_access`, for one that has parts in its place.
    """
    found = Collections()
    _find(model, "", found, {})
    for path, collection in found.all.items():
        if not by_access and hasattr(collection, "names_in_plan"):
            raise InvalidInput(
                f"module {path!r} has tables held by access, parts in their places; give the model as it was before by_access"
            )
    _check_tied(model, found)
    for path, collection in found.all.items():
        for config in configs_of(collection):
            check_config(config, f" of module {path!r}")
    return found


def weight_of(collection: Collection, table: str) -> nn.Parameter:
    """The weight of one table of a collection."""
    collection = inner_of(collection)
    holders = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    return cast(nn.Parameter, holders[table].weight)


def unseen_collections(model: nn.Module) -> list[str]:
    """Collections that a module of the model keeps in a plain list, tuple or dict, in words; also those that are modules of the
    model too, for TorchRec replaces these and not what is in a list."""
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, list | tuple | dict) and name not in ("_modules", "_parameters", "_buffers"):
                kept = value.values() if isinstance(value, dict) else value
                held = [one for one in kept if isinstance(one, nn.Module) and _holds_tables(one)]
                found += [f"{type(one).__name__} of {f'{path}.{name}'.lstrip('.')!r}" for one in held]
    return found


def _check_tied(model: nn.Module, found: Collections) -> None:
    """Raise InvalidInput where a table's weight is also that of another table or module: TorchRec makes each table's shards
    anew, so that both train apart."""
    tables: dict[int, str] = {}
    inside: set[int] = set()
    for path, collection in found.all.items():
        inside |= {id(module) for module in collection.modules()}
        for config in configs_of(collection):
            where, weight = f"table {config.name!r} of module {path!r}", id(weight_of(collection, config.name))
            if weight in tables:
                raise InvalidInput(
                    f"{tables[weight]} and {where} are one Parameter, which TorchRec would untie and train as two; let one table "
                    "have the features of both"
                )
            tables[weight] = where
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if id(weight) in tables and id(module) not in inside:
                raise InvalidInput(
                    f"{tables[id(weight)]} and {name!r} of module {path!r} ({type(module).__name__}) are one Parameter, which "
                    "TorchRec would untie and train as two; give the module a parameter of its own"
                )


def _find(module: nn.Module, path: str, found: Collections, seen: dict[int, str]) -> None:
    if id(module) in seen:  # TorchRec puts the sharded module of the first path here too
        return
    seen[id(module)] = path
    if type(module) is EmbeddingBagCollection:
        found.pooled[path] = module
    elif type(module) is FeatureProcessedEmbeddingBagCollection:
        inner = cast(nn.Module, module._embedding_bag_collection)
        if type(inner) is not EmbeddingBagCollection:
            _refuse(inner, f"{path}._embedding_bag_collection".lstrip("."))
        found.pooled[path] = inner
    elif type(module) is EmbeddingCollection:
        found.sequences[path] = module
    elif type(module) in MAPPED:
        check_mapped(module, path)
        inner = inner_of(module)
        if type(inner) not in (EmbeddingBagCollection, EmbeddingCollection):
            _refuse(inner, f"{path}.{INSIDE_MAPPED}".lstrip("."))
        (found.pooled if type(inner) is EmbeddingBagCollection else found.sequences)[path] = cast(Collection, module)
    elif hasattr(module, "names_in_plan"):  # a CollectionByAccess (client/rows/), sharded at its own path
        (found.pooled if type(module.inner) is EmbeddingBagCollection else found.sequences)[path] = module.inner
    elif _is_torchrecs_own(module) and _holds_tables(module):
        _refuse(module, path)
    elif _is_compiled(module) and type(module._orig_mod) in COVERED:
        raise InvalidInput(
            f"module {path!r} compiles its {type(module._orig_mod).__name__} (torch.compile) and goes on calling it: the sharded "
            "one in its place would never run, nor train; compile after DistributedModelParallel, or compile the module around it"
        )
    else:
        first: dict[int, str] = {}
        for name, child in module._modules.items():
            if child is None:
                continue
            below = f"{path}.{name}" if path else name
            if id(child) in first and _holds_tables(child):
                raise InvalidInput(
                    f"modules {first[id(child)]!r} and {below!r} are one {type(child).__name__}: TorchRec shards the first name "
                    "and leaves the other whole on every rank; give it one name in this module"
                )
            first.setdefault(id(child), below)
            _find(child, below, found, seen)


def _is_torchrecs_own(module: nn.Module) -> bool:
    """Whether it is, or inherits from, a class of torchrec that is more than a container."""
    return any(
        f"{kind.__module__}.".startswith("torchrec.") and not kind.__module__.startswith(CONTAINERS)
        for kind in type(module).__mro__
    )


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile makes of a module; the class itself would take seconds to import."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def _holds_tables(module: nn.Module) -> bool:
    return any(isinstance(each, (*INTERFACES, *MANAGED_COLLISIONS)) or _is_sharded(each) for each in module.modules())


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "ShardedModule" for kind in type(module).__mro__)


def _refuse(module: nn.Module, path: str) -> NoReturn:
    name = type(module).__name__
    bases = [kind for kind in type(module).__mro__[1:] if kind in COVERED]
    if any(_is_sharded(each) for each in module.modules()):
        why = "which is sharded already; give the model as it is before DistributedModelParallel"
    elif any(isinstance(each, MANAGED_COLLISIONS) for each in module.modules()):
        why = (
            "which maps ids to rows outside of a collection, and TorchRec shards it with one only: let a "
            f"{MAPPED[0].__name__} have it"
        )
    elif bases:
        why = (
            f"a subclass of {bases[0].__name__}, and TorchRec shards that class but no subclass of it; let the module hold one "
            "instead"
        )
    else:
        why = f"which a plan does not cover; it covers {' and '.join(kind.__name__ for kind in COVERED)}"
    raise InvalidInput(f"module {path!r} is a {name}, {why}")


NAMES = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
    EmbOptimType.LARS_SGD: "lars_sgd",
}


def in_backward(weight: nn.Parameter) -> tuple[list[type[Any]], dict[str, Any]]:
    """What apply_optimizer_in_backward has put on a table's weight: the optimizers, and the settings of the first."""
    return getattr(weight, "_optimizer_classes", []), dict(getattr(weight, "_optimizer_kwargs", [{}])[0])


def name_of(kind: type[Any], settings: dict[str, Any]) -> str | None:
    """Our name of an optimizer's class, None where we have none; TorchRec lets an `optimizer` among the settings count."""
    said = settings.get("optimizer")
    try:
        return NAMES.get(said if isinstance(said, EmbOptimType) else optimizer_type_to_emb_opt_type(kind))
    except ValueError:
        return None


def state_fields(weight: nn.Parameter) -> dict[str, int]:
    """The fields of Table for the optimizer on a weight; none without one, with several, or with one that we have no name of."""
    classes, settings = in_backward(weight)
    name = name_of(classes[0], settings) if len(classes) == 1 else None
    if name is None:
        return {}
    per_row, per_element = OPTIMIZER_BYTES[name]
    return {"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element}
