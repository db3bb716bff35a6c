"""What the steps of the nightly run hand to one another, as JSON: what is asked for, what was found, what is to be measured.

    Survey     the fleet, as the night began: which hardware each model's plan is for, and what is to be measured
    Work       one kind of hardware to measure, and where in the store its cases and costs meet
    Job        one pod's share of a Work
    Searched   the cost model that a plan was searched with, and why it was not the hardware's own; or why there is no plan

Measured work is kept under `_measuring/`, and how each model's last night ended under `_nights/`: no model can be called so.
"""

import json
from typing import Annotated, Any

from pydantic import Field

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.release import MODEL_NAME
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.units import parse_bytes, parse_memory
from neuroshard.core.value import Value, Whole, canonical_json, decode_json, sha256

WORK_FOLDER, NIGHTS_FOLDER = "_measuring", "_nights"
COSTS_FORMAT = 1  # of costs; those of another are never merged


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


class Request(Value):
    """What a night asks of the measuring of every kind; a later night may ask for more, which extends what is there."""

    compute_cases: Annotated[Whole, Field(ge=1)]
    collective_cases: Annotated[Whole, Field(ge=0)]
    batch_size: Annotated[Whole, Field(ge=1)]
    seed: Annotated[Whole, Field(ge=0)]
    backend: str


class Work(Value):
    """A kind of hardware to be measured with `pods` pods, each on a node of its own with `devices` devices.

    `folder` is the same for every night whose costs can be compared: later ones go on with what is there. `ranks` are the numbers
    of devices that plans on it are for, `measurable` those whose all-to-all is to be measured. With `more`, what was asked for
    is measured and did not do: more cases are drawn. Costs older than `oldest_seconds` are set aside.
    """

    hardware: Hardware
    folder: str
    pods: Annotated[int, Field(ge=1)]
    devices: Annotated[int, Field(ge=1)]
    resource: str
    node_selector: dict[str, str]
    tolerations: tuple[dict[str, Any], ...]
    ranks: tuple[int, ...] = ()
    measurable: tuple[int, ...] = ()
    more: bool = False
    oldest_seconds: float | None = None


class Job(Value):
    """Share `share` (from 1) of a work's cases, measured in the night `owner`."""

    work: Work
    share: Annotated[int, Field(ge=1)]
    owner: str = ""


class Survey(Value):
    """What the night `owner` found.

    `orders` are all models; `hardware` gives a model's name the fingerprint that its plan is for, "" where it is known by name
    alone; `kinds` is the hardware of each of those fingerprints that the fleet has. `lost` says of a model why no plan can be
    sought. `works` are the kinds to measure or learn. `notes` say what else keeps this night from being a good one.
    """

    owner: str = ""
    request: Request
    orders: tuple[Order, ...]
    hardware: dict[str, str]
    kinds: dict[str, Hardware] = Field(default_factory=dict)
    works: tuple[Work, ...]
    lost: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    max_error: float | None = None
    max_age_seconds: float | None = None

    def order(self, name: str) -> Order:
        return next(order for order in self.orders if order.name == name)

    def ranks_of(self, fingerprint: str) -> tuple[int, ...]:
        """Numbers of devices that plans on a kind of hardware are for."""
        return tuple(sorted({order.devices for order in self.orders if self.hardware.get(order.name) == fingerprint}))


class Searched(Value):
    """`model` names the cost model as `--model` does. `instead` says first thing why it is not the hardware's own that serves.

    Where there is no plan `lost` says why, and `model` is empty.
    """

    model: str = ""
    instead: str = ""
    lost: str = ""


def work_folder(fingerprint: str, request: Request) -> str:
    """The folder of the work on a kind: named by what makes costs comparable, by nothing that a later night may extend."""
    key = [request.backend, request.batch_size, request.seed, COSTS_FORMAT]
    return f"{WORK_FOLDER}/{fingerprint}/{sha256(canonical_json(key))[:16]}"


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
    """What the step before handed over. Raises InvalidInput."""
    return kind.parse(decode_json(text.encode(), kind.__name__), kind.__name__)
