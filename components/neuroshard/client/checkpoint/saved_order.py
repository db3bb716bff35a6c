"""The order of outputs that a checkpoint was trained in, against that of the model that loads it. Needs torch.

`{"output_order": output_order(model)}` in a checkpoint of torch.distributed.checkpoint is a value for each module, at the path
`(…, "output_order", module)`: its keys in order.
"""

import io
import pickle  # nosec B403
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from neuroshard.core.output_order import reordered
from neuroshard.core.plan import Plan

NAME = "output_order"
Path = tuple[Any, ...]
WRONG = "dense layers that read them by position (values()) read other columns"


class SavedOrders:
    """The orders of a checkpoint and of a state, by path, gathered while the checkpoint is read."""

    def __init__(self, whose: str, old_plan: Plan | None, new_plan: Plan | None) -> None:
        self.whose, self.plans = whose, (old_plan, new_plan)
        self.saved: dict[Path, list[str]] = {}
        self.own: dict[Path, list[str]] = {}
        self.asked: dict[str, Path] = {}

    def of_state(self, state: Mapping[str, object], paths: Mapping[str, Path]) -> set[str]:
        """Take the orders of a flat state with its paths; their keys. They are not to be read over."""
        found = {key: value for key, value in state.items() if _is_path(paths[key]) and _is_order(value)}
        self.own = {paths[key]: list(value) for key, value in found.items() if isinstance(value, list)}
        return set(found)

    def items(self, metadata: Metadata, state: Mapping[str, object], orders: set[str]) -> list[ReadItem]:
        """What to read of a checkpoint: its orders, but nothing that the `state` has under such a key and is none."""
        self.asked = {
            key: path
            for key, path in (metadata.planner_data or {}).items()
            if _is_path(path)
            and isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata)
            and (key in orders or key not in state)
        }
        at, none = MetadataIndex, torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, at(key), none, at(key), none, none) for key in self.asked]

    def take(self, item: ReadItem, value: io.BytesIO) -> bool:
        """Take what was read, if it was asked for here."""
        path = self.asked.get(item.dest_index.fqn)
        if path is None:
            return False
        with suppress(pickle.UnpicklingError):  # something else of that name
            order = torch.load(value, weights_only=True)
            if _is_order(order):
                self.saved[path] = order
        return True

    def put_into(self, state: dict[str, Any]) -> None:
        """Let a state that has orders have those of the checkpoint, as every value that is loaded."""
        for path, order in self.saved.items() if self.own else ():
            inner = state
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = order

    def difference(self) -> str | None:
        """In which order else the dense layers were trained, and what to do, for people; None where it is the same or unknown."""
        if not self.saved:
            return self._of_plans()
        if not self.own:
            return (
                f"{self.whose} says the order of outputs that it was trained in, and the state does not: if it is another one, "
                f'{WRONG}; put output_order(model) into the state as "{NAME}"'
            )
        changed = [
            (str(path[-1]), *pair)
            for path, order in self.saved.items()
            for pair in _first_difference(order, self.own.get(path, order))
        ]
        if not changed:
            return None
        module, old, new = changed[0]
        return (
            f"{self.whose} was trained with the outputs of module {module!r}{_more(len(changed))} in another order, {old!r} "
            f'where the model has {new!r}: {WRONG}; keep that order by keep_output_order(model, state["{NAME}"]), or read by key'
        )

    def _of_plans(self) -> str | None:
        old, new = self.plans
        if old is None or new is None or not (changed := reordered(old, new)):
            return None
        module = f"module {changed[0].module!r}" if changed[0].module else "the model"
        return (
            f"plan {new.digest()[:12]} returns the outputs of {module}{_more(len(changed))} in another order than plan "
            f"{old.digest()[:12]}, table {changed[0].new!r} where that had {changed[0].old!r}: {WRONG}; read by key, or "
            "keep_output_order(model, order) with output_order(model) of a job by the old plan"
        )


def _first_difference(old: list[str], new: list[str]) -> list[tuple[str, str]]:
    """The first keys that differ; "nothing" where one has fewer."""
    length = max(len(old), len(new))
    padded = ([*order, *["nothing"] * (length - len(order))] for order in (old, new))
    return [pair for pair in zip(*padded, strict=True) if pair[0] != pair[1]][:1]


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def _is_path(path: Path) -> bool:
    return len(path) > 1 and path[-2] == NAME


def _is_order(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
