"""The parameters of copied tables in a dense optimizer, when the model takes another plan. Needs torch and torchrec.

TorchRec makes a parameter of its own for each table that every rank has a copy of (data-parallel), and a trainer's dense
optimizer holds it. In a collection that is sharded anew these are new parameters, so they take the place of the old ones.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from neuroshard.core.errors import InvalidInput, UsageError

Parameters = Mapping[str, nn.Parameter]  # by key in the state of the model


class CopiesOptimizer:
    """A trainer's dense optimizer, plain or in TorchRec's wrappers; None where it gave none."""

    def __init__(self, optimizer: Any) -> None:
        self.leaves = list(_leaves(optimizer))
        self.old: Parameters = {}
        self.new: Parameters = {}
        self.fresh: dict[str, dict[Any, Any]] = {}  # state of parameters that are new to the optimizer

    def check(self, old: Parameters, new: Collection[str]) -> None:
        """Raise UsageError where there is no optimizer for copies before or after, and InvalidInput where it does not train one,
        or has several groups in which a table that becomes a copy could be."""
        self.old = old
        trained = {id(each) for leaf in self.leaves for group in leaf.param_groups for each in group["params"]}
        groups = sum(len(leaf.param_groups) for leaf in self.leaves)
        for key in sorted({*old, *new}):
            if not self.leaves:
                raise UsageError(
                    f"{key!r} is copied to every rank before or after, and a dense optimizer trains such tables; give it to "
                    "reshard as optimizer_of_copies="
                )
            if key in old and id(old[key]) not in trained:
                raise InvalidInput(
                    f"{key!r} is copied to every rank, and optimizer_of_copies does not train it; give the optimizer that does"
                )
            if key not in old and groups != 1:
                raise InvalidInput(
                    f"{key!r} becomes a copy on every rank, and optimizer_of_copies has {groups} groups that it could be in; "
                    "start again by the new plan from a checkpoint"
                )

    def prepare(self, new: Parameters) -> None:
        """Make the state of parameters that were no copies before, as their class of optimizer does, and change nothing yet."""
        self.new = new
        for key in new.keys() - self.old.keys():
            (leaf,) = self.leaves
            inner = leaf._optimizer if isinstance(leaf, KeyedOptimizerWrapper) else leaf
            options = {name: value for name, value in leaf.param_groups[0].items() if name in inner.defaults}
            self.fresh[key] = type(inner)([new[key]], **options).state.get(new[key], {})

    def take(self) -> None:
        """Put the new parameters where the old ones are, with their state."""
        for leaf in self.leaves:
            for key, old in self.old.items():
                new = [self.new[key]] if key in self.new else []
                for group in leaf.param_groups:
                    group["params"][:] = [one for each in group["params"] for one in (new if each is old else [each])]
                if old in leaf.state:
                    leaf.state.update(zip(new, [leaf.state.pop(old)], strict=False))
                if isinstance(leaf, KeyedOptimizer):
                    for name in [name for name, each in leaf.params.items() if each is old]:
                        del leaf.params[name]
                        leaf.params.update(zip([name], new, strict=False))
            for key, state in self.fresh.items():  # then there is one leaf, of one group
                leaf.param_groups[0]["params"].append(self.new[key])
                if state:
                    leaf.state[self.new[key]] = state
                if isinstance(leaf, KeyedOptimizer):
                    leaf.params[key] = self.new[key]


def _leaves(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _leaves(each)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, FusedOptimizer):
        yield optimizer
