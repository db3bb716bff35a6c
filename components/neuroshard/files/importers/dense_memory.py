"""The dense part of a model: its memory on every rank, and embeddings that are no tables. Needs torch."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from neuroshard.core.units import format_bytes

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
