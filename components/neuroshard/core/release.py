"""A release: the small pointer to what is live, a plan or a cost model; and what the gate found before it."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from neuroshard.core.clean import clean
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import carried_over
from neuroshard.core.output_order import said_reordered
from neuroshard.core.plan import PredictedMs
from neuroshard.core.units import format_bytes
from neuroshard.core.value import Digest, Moment, SparseValue, Value, canonical_json, check_format, decode_json, sha256

RELEASE_FORMAT: Literal[1] = 1
MOST_RELEASES = 10**12  # of one name: one a second for 30,000 years
Number = Annotated[int, Field(ge=1, le=MOST_RELEASES)]
Share = Annotated[float, Field(ge=0)]
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
HARDWARE = "hardware"  # the folder of all cost models, each under its hardware's fingerprint and its batch size
FINGERPRINT = r"^[0-9a-f]{16}$"
BUNDLE_FILES = ("nets.safetensors", "model.json")  # of a cost model, in the order in which they are written
SEAL = "sha256"
CLOCKS_DIFFER = timedelta(hours=1)  # at most, of two machines; a release from further in the future has no known age


def in_the_future(time: str, now: datetime) -> bool:
    """Whether a release's `time` (UTC, ISO 8601) is later than `now` by more than clocks differ."""
    return datetime.fromisoformat(time).astimezone(UTC) > now.astimezone(UTC) + CLOCKS_DIFFER


class Decision(SparseValue):
    """What the gate found about a plan, with the numbers that decided. Shares are of 1: 0.05 is 5 %.

    `refused`: a rule is broken (`faults` says which). `kept`: valid, but not predicted better than the live plan by more than
    `min_gain`. A plan that is `passed`, or `forced`, goes live. `comparison` says how, or why not: then `gain` is None.
    """

    UNSAID: ClassVar = ("changed_state", "ids_lost", "reordered", "drifted", "instead", "unserved", "deviation")

    verdict: Literal["passed", "kept", "refused"]
    forced: bool = False
    faults: tuple[str, ...] = ()
    comparison: str
    live_number: Number | None = None
    live_digest: Digest | None = None
    cost_ms: PredictedMs | None = None
    live_cost_ms: PredictedMs | None = None
    gain: Annotated[float, Field(le=1)] | None = None  # 1 - cost_ms / live_cost_ms
    min_gain: float | None = None
    cost_model_error: Share | None = None
    deviation: Share | None = None  # how far predictions may be off, where not by that error: one deviation, or a guess
    max_error: Share | None = None
    memory_left: Annotated[float, Field(ge=0, le=1)]  # of the fullest device
    memory_margin: Annotated[float, Field(ge=0, le=1)]
    # weights and optimizer state that a device did not hold before
    moved_bytes: Annotated[int, Field(ge=0, le=2**72)] | None = None
    changed_state: Annotated[int, Field(ge=0)] = 0  # tables whose optimizer state does not carry over exactly
    ids_lost: str = ""  # a line on tables whose ids cannot keep the rows that they have under the live plan
    reordered: tuple[str, ...] = ()  # modules whose outputs come in another order; "" where tables name none
    drifted: tuple[str, ...] = ()  # lines on row orders of the live plan that access has drifted from
    instead: str = ""  # as in the plan's provenance: why the plan is less certain than it could be
    unserved: str = ""  # why the live plan, which stays, does not serve today's task

    @property
    def goes_live(self) -> bool:
        return self.forced or self.verdict == "passed"

    @property
    def why(self) -> str:
        """In one line: "predicted 4.1 ms, 1.2% lower than the live plan's 4.15 ms, not more than the 5.0% asked for".

        Before it, where the plan is less certain than it could be, why.
        """
        return f"less certain: {self.instead}; {self.finding}" if self.instead else self.finding

    @property
    def finding(self) -> str:
        """`why` without what makes the plan less certain. Where two rules met it says which won."""
        if self.unserved:
            why = "; ".join(self.faults) or self.comparison
            return clean(f"{why}; and what is live does not serve today's task: {self.unserved}")
        if self.faults:
            return clean("; ".join(self.faults))
        state = f"; {self.ids_lost}" if self.ids_lost else ""
        state += f"; {carried_over(self.changed_state)}" if self.changed_state else ""
        state += f"; {said_reordered(self.reordered)}" if self.reordered else ""
        state += "".join(f"; {line}" for line in self.drifted)
        if self.gain is None or self.cost_ms is None or self.live_cost_ms is None:
            return clean(f"{self.comparison}{state}")
        change = f"{abs(self.gain):.1%} {'lower' if self.gain >= 0 else 'higher'}"
        moved = "" if self.moved_bytes is None else f"; {format_bytes(self.moved_bytes)} to move"
        # a cost that rises is below every least gain but a negative one
        limit = "" if self.gain < 0 <= (self.min_gain or 0.0) else f", {self._against_limit}"
        return f"predicted {self.cost_ms:.4g} ms, {change} than the live plan's {self.live_cost_ms:.4g} ms{limit}{moved}{state}"

    @property
    def _against_limit(self) -> str:
        """How the gain compares with the least gain, which is the one asked for or what predictions are off by."""
        least = self.min_gain or 0.0
        if least not in (self.cost_model_error, self.deviation):
            return f"{'more' if self.verdict == 'passed' else 'not more'} than the {least:.1%} asked for"
        off = "its cost model is" if least == self.cost_model_error else "its predicted cost may be"
        if self.verdict == "passed":
            return f"more than the {least:.1%} that {off} off by"
        way_out = "measure more cases, or set --min-gain"
        never = f", and no gain ever is: {way_out}" if least >= 1 else ""
        return f"not more than the {least:.1%} that {off} off by{never}"


class Sealed(Value):
    """A value whose JSON carries the sha256 of all its other fields, so that every changed byte is noticed."""

    format_version: Literal[1] = RELEASE_FORMAT

    def canonical_json(self) -> bytes:
        fields = self.model_dump(mode="json")
        return canonical_json({**fields, SEAL: sha256(canonical_json(fields))})

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """The value from a file's bytes. Raises InvalidInput or NewerFormat in one line that names `where`.

        The seal covers all that the file holds, unknown keys included.
        """
        raw = check_format(decode_json(data, where), RELEASE_FORMAT, where)
        value = cls.parse(raw, where)
        fields: dict[str, Any] = {key: raw[key] for key in raw if key != SEAL}
        try:
            seal = sha256(canonical_json(fields))
        except (ValueError, RecursionError):  # NaN, half a surrogate pair
            raise InvalidInput(f"{where}: holds what is not JSON") from None
        if raw.get(SEAL) != seal:
            raise InvalidInput(f"{where}: its {SEAL} is not that of its fields, so it was changed or damaged")
        return value


class Pointer(Sealed):
    """What has been live under one name of a store since `time` (UTC, ISO 8601), as release `number`, after `previous_digest`.

    `rollback_number` is the release whose artifact a rollback from this one brings back, or None where there is none. A deploy or
    promotion points to the release it replaces. A rollback copies the pointer of the release it brings back. So repeated
    rollbacks go further back, never forward.
    """

    number: Number
    previous_digest: Digest | None = None
    rollback_number: Number | None = None
    time: Moment
    action: str

    @property
    def name(self) -> str:
        """The name that it is a release of: its folder in the store."""
        raise NotImplementedError

    @property
    def artifact(self) -> str:
        """Digest of what is live."""
        raise NotImplementedError

    def brought_back(self, number: int, previous_digest: str, time: str) -> Self:
        """The release that makes this one's artifact live again."""
        update = {"number": number, "previous_digest": previous_digest, "time": time, "action": "rollback"}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _walks_back(self) -> Self:
        if self.rollback_number is not None and self.rollback_number >= self.number:
            raise ValueError(f"rollback_number {self.rollback_number} is not before release {self.number}")
        return self


class Release(Pointer):
    """`model`'s plan `plan_digest` went live."""

    model: Annotated[str, Field(pattern=MODEL_NAME)]
    plan_digest: Digest
    action: Literal["deploy", "promote", "rollback"] = "deploy"
    cost_ms: PredictedMs | None = None
    decision: Decision | None = None  # none for a rollback, which does not ask the gate

    @property
    def name(self) -> str:
        return self.model

    @property
    def artifact(self) -> str:
        return self.plan_digest

    def brought_back(self, number: int, previous_digest: str, time: str) -> Self:
        return super().brought_back(number, previous_digest, time).model_copy(update={"decision": None})


class ModelRelease(Pointer):
    """The cost model `bundle_digest` went live for a kind of hardware, whose `fingerprint` it has, at one batch size.

    `error` is its mean |predicted / measured - 1| of compute on tables that it never saw, None where it was not measured.
    """

    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)]
    bundle_digest: Digest
    action: Literal["publish", "promote", "rollback"] = "publish"
    backend: str
    device_name: str
    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    error: Share | None = None
    max_error: Share | None = None  # that was asked for; None for promote, which has no limit
    forced: bool = False

    @property
    def name(self) -> str:
        return f"{HARDWARE}/{self.fingerprint}/{self.batch_size}"

    @property
    def artifact(self) -> str:
        return self.bundle_digest


class Condemned(Sealed):
    """What a `gc` that began at `time` is about to delete of `name`: until it is done, none of it can go live."""

    name: str
    digests: tuple[Digest, ...]
    time: Moment


class Refusal(Sealed):
    """A plan that was asked to go live at `time`, and what the gate found against it."""

    model: Annotated[str, Field(pattern=MODEL_NAME)]
    plan_digest: Digest
    time: Moment
    decision: Decision
