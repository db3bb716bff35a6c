"""What the steps of the nightly pipeline tell each other, as JSON: what is asked for, what was found, what is to be measured.

    Survey     the fleet, as the night began: which cost model each model's plan is searched with, and what must be measured first
    Work       one kind of hardware to measure, and where in the store its cases and costs meet
    Job        one pod's share of a Work

Work in progress lies under `_measuring/`, which no model can be called, and goes when its cost model is live.
"""

import json
from typing import Annotated, Any

from pydantic import Field

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.release import MODEL_NAME
from neuroshard.core.units import parse_bytes, parse_memory
from neuroshard.core.value import Value, Whole, decode_json

WORK_FOLDER = "_measuring"
MAX_DEVICES = 4096  # as in a sharding task


class Order(Value):
    """A model that wants a plan: its name, where its tables come from, and its trainer's devices.

    `hardware` is what those devices are called, or a part of it (H200); it may be empty where the fleet is of one kind.
    `constraints` are what a constraints.json holds. With a `move_budget` (50GiB) the plan is searched from the live one, and
    moves at most so much.
    """

    name: Annotated[str, Field(pattern=MODEL_NAME)]
    tables: str
    devices: Annotated[Whole, Field(ge=1, le=MAX_DEVICES)]
    memory: str
    hardware: str = ""
    constraints: dict[str, Any] = Field(default_factory=dict)
    move_budget: str = ""

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of each device. Raises UsageError for what is no amount of memory."""
        return parse_memory(self.memory, self.devices)

    @property
    def move_budget_bytes(self) -> int | None:
        """None where everything may move. Raises UsageError for what is no amount of memory."""
        return parse_bytes(self.move_budget) if self.move_budget else None


class Work(Value):
    """A kind of hardware to be measured with `pods` pods, each on a node of its own with `devices` devices.

    `folder` is the same for every night until a cost model is live: a night that failed is gone on with.
    """

    hardware: Hardware
    folder: str
    pods: Annotated[int, Field(ge=1)]
    devices: Annotated[int, Field(ge=1)]
    resource: str
    node_selector: dict[str, str]
    tolerations: tuple[dict[str, Any], ...]

    def job_folder(self, share: int) -> str:
        return f"{self.folder}/costs-{share}-of-{self.pods}"


class Job(Value):
    """Share `share` (from 1) of a work's cases."""

    work: Work
    share: Annotated[int, Field(ge=1)]

    @property
    def folder(self) -> str:
        return self.work.job_folder(self.share)


class Survey(Value):
    """`hardware` gives each model's name the fingerprint that its plan is searched with. `works` are what to measure first."""

    orders: tuple[Order, ...]
    hardware: dict[str, str]
    works: tuple[Work, ...]

    def order(self, name: str) -> Order:
        return next(order for order in self.orders if order.name == name)


def read_orders(models: str) -> tuple[Order, ...]:
    """The list of models that want a plan, from JSON. Raises UsageError and InvalidInput, before hours of measuring."""
    listed = decode_json(models.encode(), "models")
    if not isinstance(listed, list) or not listed:
        raise UsageError(
            'models must be a JSON list of at least one model, as in [{"name": "ads", "tables": "s3://…/tables.json", '
            f'"devices": 8, "memory": "80GiB"}}], not {json.dumps(listed)[:80]}'
        )
    orders = tuple(Order.parse(order, f"models[{index}]") for index, order in enumerate(listed))
    names = [order.name for order in orders]
    for order in orders:
        _ = order.memory_bytes, order.move_budget_bytes
        if names.count(order.name) > 1:
            raise UsageError(f"model {order.name!r} is asked for {names.count(order.name)} times; give each model once")
    return orders


def told(kind: type[Value], text: str) -> Any:
    """What a step was told. Raises InvalidInput."""
    return kind.parse(decode_json(text.encode(), kind.__name__), kind.__name__)
