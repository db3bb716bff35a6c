"""The parameters of copied tables in a dense optimizer, when the model takes another plan. Needs torch and torchrec.

TorchRec makes a parameter of its own for each table that every rank has a copy of (data-parallel), and a trainer's dense
optimizer holds it. In a collection that is sharded anew these are new parameters, so they take the place of the old ones in the
optimizer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from neuroshard.core.errors import InvalidInput, UsageError

Parameters = Mapping[tuple[str, str], nn.Parameter]  # by path of the collection, and name of the table


class CopiesOptimizer:
    """A trainer's dense optimizer, plain or in TorchRec's wrappers; None where it gave none."""

    def __init__(self, optimizer: Any) -> None:
        self.leaves = list(_leaves(optimizer))
        self.old: Parameters = {}
        self.new: Parameters = {}
        self.keys: Mapping[tuple[str, str], str] = {}
        self.fresh: dict[tuple[str, str], dict[Any, Any]] = {}  # state of parameters that are new to the optimizer

    def check(self, old: Parameters, new: set[tuple[str, str]]) -> None:
        """Raise UsageError where there is no optimizer for copies before or after, and InvalidInput where it does not train one,
        or has several groups in which a table that becomes a copy could be."""
        self.old = old
        if not old and not new:
            return
        path, table = min([*old, *new])
        if not self.leaves:
            raise UsageError(
                f"table {table!r} of module {path!r} is copied to every rank before or after, and a dense optimizer trains such "
                "tables; give it to reshard as optimizer_of_copies="
            )
        for (path, table), parameter in old.items():
            if self._group_of(parameter) is None:
                raise InvalidInput(
                    f"table {table!r} of module {path!r} is copied to every rank, and optimizer_of_copies does not train it; "
                    "give the optimizer that does"
                )
        for path, table in sorted(new - old.keys()):
            if (groups := sum(len(leaf.param_groups) for leaf in self.leaves)) != 1:
                raise InvalidInput(
                    f"table {table!r} of module {path!r} becomes a copy on every rank, and optimizer_of_copies has {groups} "
                    "groups that it could be in; start again by the new plan from a checkpoint"
                )

    def prepare(self, new: Parameters, keys: Mapping[tuple[str, str], str]) -> None:
        """Make the state of parameters that were no copies before, and change nothing yet. Raises InvalidInput."""
        self.new, self.keys = new, keys
        for place in new.keys() - self.old.keys():
            (leaf,) = self.leaves
            inner = leaf._optimizer if isinstance(leaf, KeyedOptimizerWrapper) else leaf
            options = {key: value for key, value in leaf.param_groups[0].items() if key in inner.defaults}
            try:
                alone = type(inner)([new[place]], **options)
            except TypeError as error:
                raise InvalidInput(
                    f"table {place[1]!r} of module {place[0]!r} becomes a copy on every rank, and a {type(inner).__name__} "
                    f"cannot take a parameter more ({error}); start again by the new plan from a checkpoint"
                ) from None
            self.fresh[place] = alone.state.get(new[place], {})

    def take(self) -> None:
        """Put the new parameters where the old ones are, with their state."""
        for place, parameter in self.old.items():
            found = self._group_of(parameter)
            assert found is not None
            leaf, group = found
            at = next(n for n, each in enumerate(group["params"]) if each is parameter)
            state = leaf.state.pop(parameter, None)
            if (new := self.new.get(place)) is None:
                del group["params"][at]
            else:
                group["params"][at] = new
                if state is not None:
                    leaf.state[new] = state
            if isinstance(leaf, KeyedOptimizer):
                key = next(key for key, each in leaf.params.items() if each is parameter)
                del leaf.params[key]
                if new is not None:
                    leaf.params[key] = new
        for place in self.new.keys() - self.old.keys():
            (leaf,) = self.leaves
            leaf.param_groups[0]["params"].append(self.new[place])
            if self.fresh[place]:
                leaf.state[self.new[place]] = self.fresh[place]
            if isinstance(leaf, KeyedOptimizer):
                leaf.params[self.keys[place]] = self.new[place]

    def _group_of(self, parameter: nn.Parameter) -> tuple[Any, dict[str, Any]] | None:
        for leaf in self.leaves:
            for group in leaf.param_groups:
                if any(each is parameter for each in group["params"]):
                    return leaf, group
        return None


def _leaves(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _leaves(each)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, FusedOptimizer):
        yield optimizer
