"""The messages that the steps of a nightly run pass on as JSON.

    Survey     what the run found: each model's hardware, and what to measure. It is in the store (store/night.py)
    Campaign   one kind of hardware to measure, and where in the store its cases and costs are
    Job        one pod's share of a Campaign

They are below the stages because `measure` and `fleet` parse them too, and no stage imports nightly/.

Cases and costs are kept under `_measuring/` in the store, and each model's last verdict under `_nightly/`. No model can have
either name.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.release import MODEL_NAME, MOST_RELEASES
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.topology import Topology
from neuroshard.core.value import Switch, Value, Whole, canonical_json, decode_json, sha256, shown
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.orders.options import OPTIONS, EverySearch, declared
from neuroshard.orders.search import SearchOrder
from neuroshard.orders.sizes import NightlySizes, SizeOrder

MEASURING_FOLDER, VERDICTS_FOLDER = "_measuring", "_nightly"
COSTS_FORMAT = 1  # costs of different formats are never merged
MAX_BATCH_SIZE = 2**31  # as in a sharding task
MAX_CASES = 10**7  # as in augment
MAX_PODS = 10_000
MAX_SEED = 2**53  # KFP passes whole numbers as doubles
MOST_COUNTED = 2**63  # Kubernetes counts devices as int64
Rank = Annotated[int, Field(ge=1, le=MAX_DEVICES)]  # a number of ranks
Seconds = Annotated[float, Field(ge=0, le=1e9)]  # as in a duration: thirty years


class _Model(Value):
    """A model that needs a plan: its name, where its tables come from, and options of the search, as text where they have units.

    `hardware` is the devices' name, or a part of it (H200); where it is empty it is the fleet's, of several kinds a likely
    one. `constraints` has the fields of a constraints.json. With `move_budget` or `keep_optimizer_state` the plan is searched
    from the live one. Ranks are joined as the nodes are where the model names no `domain` and no `local_world_size`. With
    `counted_access` its tables are read as its trainer recorded, where one did; else as `tables` says. With `size` a page of
    sizes is put beside its release.
    """

    name: Annotated[str, Field(pattern=MODEL_NAME)]
    tables: str
    hardware: str = ""
    constraints: dict[str, Any] = Field(default_factory=dict)
    counted_access: Switch = True
    size: NightlySizes | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_groups(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        sizes = data.get("size")
        said = {*data, *(sizes if isinstance(sizes, dict) else ())}
        given = next((name for name in ("group_size", "sync_every") if name in said), None)
        if given is not None:
            raise ValueError(
                f"{given} of model {shown(data.get('name'))}: no groups of ranks are planned at night, whose cost models are "
                "measured for the whole batch; leave it out, or search by hand (neuroshard search --group-size) and deploy that"
            )
        return data

    @property
    def rules(self) -> ConstraintsFile:
        """Its constraints. Raises InvalidInput for invalid ones."""
        return ConstraintsFile.parse(self.constraints, f"constraints of model {self.name!r}")

    @property
    def order(self) -> SearchOrder:
        """What it asks of the search but its constraints. Raises UsageError for an invalid option."""
        return SearchOrder.of(self._options)

    @property
    def most_memory(self) -> int:
        """Bytes that its plan may take of a device, of the one of which it may take most."""
        return int(max(self.order.task["device_memory_bytes"]))

    @property
    def _options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _ENTRIES}
        return {
            name: [value] if value and OPTIONS[name].kind == list[str] else value
            for name, value in given.items()
            if value != ""  # as if it were absent
        }

    def sizes(self, batch_size: int, store: str) -> SizeOrder | None:
        """The sweep of sizes that it asks for, in the night's `store`; None where it asks for none. What is of hardware, as
        `domain` and `network`, is of `size` alone; other options are the model's. Raises UsageError."""
        if self.size is None:
            return None
        asked = {name: value for name, value in self._options.items() if name in _EVERY_SEARCH}
        try:
            return self.size.order(self.hardware, asked, batch_size=batch_size, store=store)
        except UsageError as error:
            raise UsageError(f"size of model {self.name!r}: {error}") from None

    @property
    def starts_from_live(self) -> str:
        """The option by which the plan is searched from the live one; empty where it is not."""
        asked = ("move_budget", "keep_optimizer_state")
        return next((name for name in asked if getattr(self, name)), "")


_EVERY_SEARCH = declared(EverySearch)
_ENTRIES: dict[str, Any] = {
    name: (option.models_yaml, ... if option.required else None if option.default == () else option.default)
    for name, option in OPTIONS.items()
    if option.models_yaml
}
if TYPE_CHECKING:
    ModelSpec = _Model
else:
    ModelSpec = create_model("ModelSpec", __base__=_Model, __module__=__name__, __doc__=_Model.__doc__, **_ENTRIES)


class Request(Value):
    """What to measure of every kind of hardware. A later run may ask for more, which extends what an earlier one measured."""

    compute_cases: Annotated[Whole, Field(ge=1, le=MAX_CASES)]
    collective_cases: Annotated[Whole, Field(ge=0, le=MAX_CASES)]
    batch_size: Annotated[Whole, Field(ge=1, le=MAX_BATCH_SIZE)]
    seed: Annotated[Whole, Field(ge=0, le=MAX_SEED)]
    backend: str


class Campaign(Value):
    """A kind of hardware to measure with `pods` pods, each on a node of its own with `devices` devices.

    Runs whose costs can be compared have one `folder`, so that each continues the one before. `ranks` are the numbers of
    devices that plans on this hardware are for, `measurable` those whose all-to-all is to be measured. With `more`, more cases
    than requested are drawn, since those gave no good cost model. With `tiers`, cases beyond HBM are drawn too. Costs older than
    `oldest_seconds` are set aside. `why` says what its cost model lacks.
    """

    hardware: Hardware
    folder: str
    pods: Annotated[int, Field(ge=1, le=MAX_PODS)]
    devices: Annotated[int, Field(ge=1, le=MOST_COUNTED)]
    resource: str
    node_selector: dict[str, str]
    tolerations: tuple[dict[str, Any], ...]
    ranks: tuple[Rank, ...] = ()
    measurable: tuple[Rank, ...] = ()
    more: bool = False
    tiers: bool = False
    oldest_seconds: Seconds | None = None
    why: str = ""


class Job(Value):
    """Share `share` (from 1) of the cases of a campaign, measured in the nightly run `owner`."""

    campaign: Campaign
    share: Annotated[int, Field(ge=1, le=MAX_PODS)]
    owner: str = ""


class Survey(Value):
    """What the nightly run `owner` found.

    `models` are all that need a plan. `hardware` maps a model to the fingerprint of its hardware, "" where that is not known;
    `kinds` maps fingerprints to the hardware of the fleet, and `topologies` to how its nodes are joined, where that is known.
    `no_plan` maps each model that cannot be planned to the reason. `campaigns` are those of the kinds to measure or learn.
    `at_once` are the models that are planned before anything is measured. `notes` are faults of the run that degrade every plan,
    and `parameters` those of the pipeline.
    """

    owner: str = ""
    request: Request
    models: tuple[ModelSpec, ...]
    hardware: dict[str, str]
    kinds: dict[str, Hardware] = Field(default_factory=dict)
    topologies: dict[str, Topology] = Field(default_factory=dict)
    campaigns: tuple[Campaign, ...]
    no_plan: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    max_error: Annotated[float, Field(ge=0)] | None = None
    max_age_seconds: Seconds | None = None
    at_once: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)

    def spec(self, name: str) -> ModelSpec:
        return next(spec for spec in self.models if spec.name == name)

    def campaign(self, fingerprint: str) -> Campaign:
        return next(one for one in self.campaigns if one.hardware.fingerprint == fingerprint)


# The new plan went live; or it is valid, but the live one stays; or there is no new plan, or it broke a rule, and the live one
# stays; or there is no new plan, and nothing is live, or the live plan cannot be loaded.
End = Literal["live", "kept", "no plan", "red"]


class Verdict(Value):
    """How the nightly run `run` ended for a model, and why.

    `doubts` are the reasons why the model's plan is degraded, if it is; `release` is the number of the live release, 0 where
    nothing is live, None where that cannot be read. `no_sizes` says why tonight's page of sizes is missing, if one was asked for.
    `hardware` is the kind that the night was for, and `before` that of the last night where that was another one.
    """

    run: str
    model: str
    end: End
    why: str
    doubts: tuple[str, ...] = ()
    release: Annotated[int, Field(ge=0, le=MOST_RELEASES)] | None = 0
    no_sizes: str = ""
    hardware: str = ""
    before: str = ""

    @property
    def is_degraded(self) -> bool:
        return bool(self.doubts or self.no_sizes or self.end == "no plan")

    @property
    def text(self) -> str:
        """One line, with what is wrong first."""
        said = {"live": "has today's plan", "kept": "keeps its live plan"}.get(self.end, "has no new plan")
        unnumbered = "nothing is live" if self.release == 0 else "what is live cannot be read"
        live = f"release {self.release} is live" if self.release else unnumbered
        doubts = "; ".join(doubt for doubt in self.doubts if doubt != self.why)
        no_sizes = f"; no page of sizes: {self.no_sizes}" if self.no_sizes else ""
        of = f" for {self.hardware}, the night before for {self.before}" if self.before else ""
        return f"{self.model} {said} ({live}){of}: {f'degraded: {doubts}; ' if doubts else ''}{self.why}{no_sizes}"


def campaign_folder(fingerprint: str, request: Request) -> str:
    """The folder of the campaign on a kind of hardware: runs whose costs can be compared have the same."""
    key = [request.backend, request.batch_size, request.seed, COSTS_FORMAT]
    return f"{MEASURING_FOLDER}/{fingerprint}/{sha256(canonical_json(key))[:16]}"


def read_specs(models: str) -> tuple[ModelSpec, ...]:
    """The models that need a plan, from JSON. Raises UsageError and InvalidInput."""
    listed = decode_json(models.encode(), "models")
    if not isinstance(listed, list) or not listed:
        raise UsageError(
            'models must be a JSON list of at least one model, as in [{"name": "ads", "tables": "s3://…/tables.json", '
            f'"devices": 8, "memory": "80GiB"}}], not {json.dumps(listed)[:80]}'
        )
    specs = tuple(ModelSpec.parse(spec, f"models[{index}]") for index, spec in enumerate(listed))
    names = [spec.name for spec in specs]
    for spec in specs:
        try:
            _ = spec.order
        except UsageError as error:
            raise UsageError(f"model {spec.name!r}: {error}") from None
        _ = spec.sizes(1, "")  # of any batch size and store
        if names.count(spec.name) > 1:
            raise UsageError(f"model {spec.name!r} is asked for {names.count(spec.name)} times; give each model once")
    return specs
