"""The tables of a user's own model: `neuroshard tables --from-torchrec package.module:make_model`. Needs torch.

`make_model` is called without arguments, with every tensor made on the meta device: shapes, but no weights, however large.
"""

import importlib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.text import one_line
from neuroshard.core.units import format_bytes
from neuroshard.core.value import shown
from neuroshard.files.importers.imported import APART, TableEntry
from neuroshard.files.importers.torchrec_tables import (
    WEIGHTED_MEAN,
    config_fields,
    configs_of,
    has_own_operator,
    id_map,
    is_weighted,
    read_by_several,
)

EXAMPLE = "as in my_package.model:make_model"


def torchrec_entries(
    spec: str, pooling_factors: Mapping[str, float], default_pooling_factor: float | None = None
) -> tuple[list[TableEntry], list[str]]:
    """The model's tables as entries, and notes.

    `pooling_factors` are lookups a sample by the name of a table, its module's path before it or not, or of a feature (a table
    has the sum of its features'); where neither is there, a feature has `default_pooling_factor` lookups (1, with a note, as
    TorchRec's planner). Raises UsageError for an invalid `spec`, InvalidInput for a model that cannot be made, holds no tables
    or holds some that no plan covers, and for a pooling factor of an unknown name.
    """
    return entries_of(make_on_meta(spec), spec, pooling_factors, default_pooling_factor)


def entries_of(
    model: nn.Module, spec: str, pooling_factors: Mapping[str, float], default_pooling_factor: float | None = None
) -> tuple[list[TableEntry], list[str]]:
    """`torchrec_entries` of a model that is made already; messages call it `spec`."""
    entries: list[TableEntry] = []
    assumed: list[tuple[str, str]] = []
    names = Counter[str]()
    apart: list[str] = []
    means: list[str] = []
    known: set[str] = set()
    collections = list(_collections(model, spec))
    for path, collection in collections:
        weighted, configs = is_weighted(collection), configs_of(collection)
        shared = read_by_several(configs)
        for config in configs:
            features = list(config.feature_names) or [config.name]
            full = f"{path}.{config.name}" if path else config.name
            known |= {config.name, full, *features}
            own = pooling_factors.get(full, pooling_factors.get(config.name))
            if own is None:
                each = [pooling_factors.get(feature, default_pooling_factor) for feature in features]
            else:  # a feature may be called as its table is
                each = [None if one in (full, config.name) else pooling_factors.get(one) for one in features]
            names[config.name] += 1
            assumed += [(config.name, full)] if own is None and None in each else []
            fields = config_fields(config, _lookups(each, own), weighted, id_map(collection, config), shared)
            apart += [config.name] if has_own_operator(config) else []
            means += [config.name] if weighted and fields["pooling"] == "mean" else []
            entries.append(TableEntry(f"{spec}: {full}", {**fields, **_state(collection, config.name), "module": path}))
    modules = [collection for _, collection in collections]
    plain = torch_embeddings(model, modules)
    if not entries:
        instead = f", but {_some(plain)}: make them tables of one" if plain else ""
        raise InvalidInput(f"{spec}: the model holds no EmbeddingBagCollection and no EmbeddingCollection{instead}")
    unknown = sorted(pooling_factors.keys() - known)
    if unknown:
        given = f"{spec}: a pooling factor is given for {unknown[0]!r}"
        raise InvalidInput(f"{given}, which is no table or feature of the model")
    return entries, [
        *_notes([name if names[name] < 2 else full for name, full in assumed], apart, means, plain, _unseen(model)),
        *reserve_notes(model, modules),
    ]


def features_of(model: nn.Module, spec: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """The features that read each table, by the path of its module and its name there."""
    return {
        (path, config.name): tuple(config.feature_names) or (config.name,)
        for path, collection in _collections(model, spec)
        for config in configs_of(collection)
    }


def _lookups(each: Sequence[float | None], total: float | None) -> list[float]:
    """Lookups a sample of each feature of a table: the given number, or 1; where the table's `total` is given, features without a
    number share the rest equally."""
    if total is None:
        return [1.0 if one is None else one for one in each]
    known, unknown = sum(one or 0.0 for one in each), sum(one is None for one in each)
    if not unknown or known > total:
        return [(one or 0.0) * total / known if known else total / len(each) for one in each]
    return [(total - known) / unknown if one is None else one for one in each]


def _state(collection: Any, table: str) -> dict[str, int]:
    """The fields of Table for what apply_optimizer_in_backward has put on a table, which TorchRec trains it by."""
    from neuroshard.files.importers.torchrec_collections import state_fields, weight_of

    return state_fields(weight_of(collection, table))


def _notes(
    assumed: list[str], apart: list[str], means: list[str], plain: list[str], unseen: Mapping[str, list[str]]
) -> list[str]:
    notes = {
        "no pooling factor, so 1 lookup a feature and sample is assumed; give the real ones with --pooling-factors, as "
        '{"user_id": 3}, for costs grow with them': assumed,
        APART: apart,
        WEIGHTED_MEAN: means,
        "in no collection of TorchRec, so every rank holds it whole, as dense parameters, and no plan places it; make it a table "
        "of an EmbeddingBagCollection or EmbeddingCollection if it is large": plain,
        **unseen,
    }
    return [f"{_some(names)}: {note}" for note, names in notes.items() if names]


def _some(names: list[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _collections(model: nn.Module, spec: str) -> Iterator[tuple[str, Any]]:
    """Path and module of every collection, pooled ones first. Raises InvalidInput for one that no plan covers."""
    if "torchrec" not in sys.modules:  # then no module is one of its collections
        return
    from neuroshard.files.importers.torchrec_collections import find_collections

    try:
        found = find_collections(model)
    except InvalidInput as error:
        raise InvalidInput(f"{spec}: {error}") from None
    yield from found.pooled.items()
    yield from found.sequences.items()


def _unseen(model: nn.Module) -> dict[str, list[str]]:
    """The collections that torch does not see, by what that means."""
    if "torchrec" not in sys.modules:
        return {}
    from neuroshard.files.importers.torchrec_collections import UNSEEN, unseen_collections

    return {UNSEEN: unseen_collections(model)}


def make_on_meta(spec: str) -> nn.Module:
    """The model, every tensor on the meta device. What it prints goes to stderr; its warnings are dropped.

    Raises UsageError and InvalidInput.
    """
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        make = _find(spec)
        if isinstance(make, nn.Module):
            return make
        if not callable(make):
            raise InvalidInput(
                f"{spec}: is {shown(make)}, which cannot be called; give a function that returns the model"
            )
        with _one_line(f"{spec}: called on the meta device,"), _OnMeta():
            _check_arguments(spec, make)
            model = make()
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{spec}: returned {shown(model)}, not a torch.nn.Module")
    return model


def _find(spec: str) -> Any:
    """What `package.module:attribute` names, with the working directory on the path as `python -m` has it."""
    module_name, _, attribute = spec.partition(":")
    if not attribute or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise UsageError(f"{spec!r} does not name a function in a module; write package.module:function, {EXAMPLE}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _one_line(f"{spec}: importing {module_name}"):
            found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"{spec}: importing {module_name} needs the module {error.name}, which is not installed"
            ) from None
        raise InvalidInput(
            f"{spec}: there is no module {error.name!r}, neither installed nor in {Path.cwd()}"
        ) from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            there = ", ".join(_callables(found, module_name)[:6]) or "no functions"
            raise InvalidInput(f"{spec}: {module_name} has no {name!r}; it has {there}")
        found = getattr(found, name)
    return found


def _callables(place: Any, module_name: str) -> list[str]:
    """Public names of a module, or of a class in it, that can be called: those defined in this module first, then imported
    ones."""
    of = {name: value for name, value in vars(place).items() if callable(value) and name[0] != "_"}
    return sorted(of, key=lambda name: getattr(of[name], "__module__", None) != module_name)


def _check_arguments(spec: str, make: Callable[..., Any]) -> None:
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(make).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except ValueError:  # a builtin may have no signature
        return
    if needed:
        raise InvalidInput(
            f"{spec}: needs arguments ({', '.join(needed)}); give a function without, which calls it with yours"
        )


@contextmanager
def _one_line(doing: str) -> Iterator[None]:
    """Whatever a user's code raises as one line that says where; a missing module is the caller's to explain."""
    try:
        yield
    except (InvalidInput, UsageError, ModuleNotFoundError, KeyboardInterrupt):
        raise
    except BaseException as error:
        frame = inspect.getinnerframes(error.__traceback__)[-1] if error.__traceback__ else None
        place = f" (at {Path(frame.filename).name}:{frame.lineno})" if frame else ""
        hint = "; leave out what reads the values of weights" if "meta tensor" in str(error) else ""
        said = one_line(error, 200)
        raise InvalidInput(f"{doing} raised {type(error).__name__}: {said}{place}{hint}") from None


class _OnMeta(TorchFunctionMode):
    """Every tensor is made on the meta device, whatever device the code names, and stays there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if func is torch.Tensor.to:
            kinds = [getattr(arg, "dtype", arg) for arg in (*args[1:], kwargs.get("dtype"))]  # those of another tensor
            dtype = next((kind for kind in kinds if isinstance(kind, torch.dtype)), None)
            return args[0] if dtype is None else args[0].type(dtype)
        return func(*args, **kwargs)


COPIES = 4  # of each trained parameter: weight, gradient, and the two moments of Adam, all of the parameter's type


def dense_bytes(model: nn.Module, collections: Iterable[nn.Module]) -> int:
    """Bytes of a model's parameters that none of these collections holds, trained with Adam.

    Not covered: activations, buffers, the buckets of DistributedDataParallel, lazy parameters that have no shape yet, and tables
    that a plan will copy to every rank, which the dense optimizer trains too.
    """
    in_tables = {id(parameter) for collection in collections for parameter in collection.parameters()}
    dense = [p for p in model.parameters() if id(p) not in in_tables and not is_lazy(p)]
    return sum(p.numel() * p.element_size() * (COPIES if p.requires_grad else 1) for p in dense)


def reserve_notes(model: nn.Module, collections: Iterable[nn.Module]) -> list[str]:
    """A note on what to reserve for the dense part of a model; none where it has no parameters."""
    need = dense_bytes(model, collections)
    if not need:
        return []
    amount = format_bytes(need, "up")
    return [
        f"the model's dense parameters need {amount} of every rank (weights, gradients, Adam's moments): search with --reserve "
        f"{amount.replace(' ', '')}, or more, for activations are not in it"
    ]


def torch_embeddings(model: nn.Module, collections: Iterable[nn.Module]) -> list[str]:
    """PyTorch's own embeddings outside of these collections, the largest first: `bag (nn.EmbeddingBag, 1,000,000 x 64)`."""
    inside = {id(module) for collection in collections for module in collection.modules()}
    found = [
        (module.num_embeddings * module.embedding_dim, path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module) not in inside
    ]
    return [
        f"{path or 'the model'} (nn.{type(module).__name__}, {module.num_embeddings:,} x {module.embedding_dim})"
        for _, path, module in sorted(found, key=lambda one: (-one[0], one[1]))
    ]
