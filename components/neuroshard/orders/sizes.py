"""The options of `neuroshard size`, checked: kinds of hardware, numbers of devices, prices.

`size` of a model of models.yaml (NightlySizes) makes the same order. An option of a kind of hardware is a value for all kinds, or
KIND=VALUE for one: `--memory 80GiB --memory analytic:b200=179GiB`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

from pydantic import BeforeValidator, Field

from neuroshard.core.errors import UsageError
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.units import parse_bytes, parse_step_time
from neuroshard.core.value import Value, Whole, shown
from neuroshard.orders import values as take
from neuroshard.orders.options import OPTIONS, EverySearch, Option, declared

MOST_PROCESSES = 64  # of a sweep: a guess, more than sizes are left at once
MOST_SAMPLES = 2**31  # of a batch, as of a task's
MOST_PRICE = 1e12  # of a device and hour in any currency: a guess, far from where money overflows
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_NAME = re.compile(r"(analytic:)?[^:#/=,]+")  # of a model in models.yaml: no path, no STORE#HARDWARE
_AMOUNT = r"[0-9]+(?:\.[0-9]+)?"
_CURRENCY = r"[A-Z]{3}|[$€£¥]"
_PRICE = re.compile(rf"(?P<before>{_CURRENCY})?\s*(?P<amount>{_AMOUNT})\s*(?P<after>{_CURRENCY})?\s*/\s*h")


@dataclass(frozen=True)
class DenseTime:
    """What a step takes beside embeddings: `ms`, whatever the batch, or, where `samples` are given, with so many a device, and in
    proportion with more or fewer."""

    ms: float
    samples: int | None = None

    def at(self, samples: float) -> float:
        """Ms with so many samples a device."""
        return self.ms if self.samples is None else self.ms * samples / self.samples


@dataclass(frozen=True)
class Kind:
    """A kind of hardware: its cost model's name, the amounts of memory of a device to try (None: the one of its datasheet, or of
    where it was measured), memory of a host for tables, ranks of a domain and of a host, the price of a device and hour, and what
    a step takes beside embeddings."""

    name: str
    memories: tuple[int, ...] | None = None
    host_memory_bytes: int | None = None
    domain: int | None = None
    local_world_size: int | None = None
    price: float | None = None
    dense: DenseTime | None = None


@dataclass(frozen=True)
class SizeOrder:
    """What to sweep. `batch_per_device` is None where the global batch is fixed (strong scaling). `search` are options of every
    search (orders/options.py). `currency` is as prices say it, empty where they do not."""

    kinds: tuple[Kind, ...]
    devices: tuple[int, ...]
    batch_per_device: int | None
    currency: str
    time_budget_s: float | None
    search: Mapping[str, Any]

    @property
    def has_dense_time(self) -> bool:
        """Whether times are of whole steps, not of embeddings alone; as with prices, for all kinds or none."""
        return self.kinds[0].dense is not None

    @property
    def group_size(self) -> int | None:
        """Ranks of a group that every size shall have; None where they are chosen, or all ranks are one group."""
        size = self.search.get("group_size")
        checked = OPTIONS["group_size"].checked(size)
        return checked if isinstance(checked, int) else None

    @property
    def priced(self) -> bool:
        """Whether the devices have prices; all kinds have one, or none."""
        return self.kinds[0].price is not None

    def batch_size(self, devices: int) -> int | None:
        """Samples a step of so many devices; None where it is the cost model's."""
        fixed: int | None = self.search.get("batch_size")
        return fixed if self.batch_per_device is None else self.batch_per_device * devices


def numbers_of_devices(name: str, given: object) -> tuple[int, ...]:
    """`4-128` doubles from 4 up to 128, `8-64/8` goes in steps of 8, `4,12` are these: in order, each once. Raises UsageError."""
    found: set[int] = set()
    for part in take.amounts(name, given, "'4-128'").split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last, step = (int(n) if n else 0 for n in match.groups()) if match else (0, 0, 0)
        last = last or first
        if match is None or not 1 <= first <= last <= MAX_DEVICES or match[3] == "0":
            raise UsageError(
                f"{name} {shown(part)} is no number from 1 to {MAX_DEVICES}, and no range: 4-128 doubles from 4 on, 8-64/8 goes "
                "in steps of 8"
            )
        while first <= last:
            found.add(first)
            first = first + step if step else 2 * first
    return tuple(sorted(found))


def _memories(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))


def _ranks(text: str) -> int:
    if not text.strip().isdigit() or not 1 <= int(text) <= MAX_DEVICES:
        raise UsageError(f"{shown(text)} is no number of ranks from 1 to {MAX_DEVICES}")
    return int(text)


def _dense(text: str) -> DenseTime:
    """`12ms`, or `12ms@8192` of 8,192 samples a device."""
    time, at, samples = text.partition("@")
    if at and (not re.fullmatch(r"[0-9]{1,10}", samples) or not 1 <= int(samples) <= MOST_SAMPLES):
        raise UsageError(f"{shown(text)}: after @ are the samples of a device that the time is of, as in 12ms@8192")
    return DenseTime(parse_step_time(time), int(samples) if at else None)


def _price(text: str) -> tuple[float, str]:
    """`2.40/h`, `$2.40/h`, `2.40 EUR/h` as an amount and a currency, which may be empty."""
    match = _PRICE.fullmatch(text.strip())
    if match is None or (match["before"] and match["after"]) or not 0 < float(match["amount"]) < MOST_PRICE:
        raise UsageError(
            f"{shown(text)} is not the price of a device and hour; write 2.40/h, with a currency $2.40/h or 2.40EUR/h"
        )
    return float(match["amount"]), match["before"] or match["after"] or ""


def _of_kinds(reads: Callable[[str], object], word: str, field: str = "") -> Option:
    return Option(reads, word, (), kind=list[str], field=field)


class _OfASweep(TypedDict):
    devices: Annotated[
        str | int | Sequence[int],
        "Numbers of devices: 4-128 doubles from 4 on, 8-64/8 goes in steps of 8; or 4,12,16.",
        Option(numbers_of_devices, "NUMBERS"),
    ]


class _OfKinds(TypedDict, total=False):
    memory: Annotated[
        Sequence[str],
        "Memory of a device, several with commas (20GiB,40GiB) [default: as measured, or by datasheet]. For one kind: "
        "KIND=SIZES; may be repeated.",
        _of_kinds(_memories, "SIZES", "memories"),
    ]
    host_memory: Annotated[
        Sequence[str],
        "Memory of a host for tables that HBM does not hold. For one kind: KIND=SIZE; may be repeated.",
        _of_kinds(parse_bytes, "SIZE", "host_memory_bytes"),
    ]
    domain: Annotated[
        Sequence[str],
        "Ranks that share fast links; sizes that it does not divide are left out. For one kind: KIND=NUMBER; may be repeated.",
        _of_kinds(_ranks, "NUMBER"),
    ]
    local_world_size: Annotated[
        Sequence[str], "Ranks of a host. For one kind: KIND=NUMBER; may be repeated.", _of_kinds(_ranks, "NUMBER")
    ]
    price: Annotated[
        Sequence[str],
        "Price of a device and hour, 2.40/h or 2.40EUR/h. For one kind: KIND=PRICE; may be repeated.",
        _of_kinds(_price, "PRICE"),
    ]
    dense_time: Annotated[
        Sequence[str],
        "Time of a step that is not of embeddings: 12ms at every size, or 12ms@8192 with 8,192 samples a device, and in "
        "proportion with others. For one kind: KIND=TIME; may be repeated.",
        _of_kinds(_dense, "TIME", "dense"),
    ]


class _OfAll(TypedDict, total=False):
    batch_per_device: Annotated[
        int | None, "Samples of a device a step: weak scaling, in place of --batch-size.", Option(int, least=1)
    ]
    time_budget: Annotated[
        str | float | None, "Search for this long at most, all sizes together: 60s, 5m.", Option(take.duration, "TIME")
    ]


class SizeOptions(_OfASweep, _OfKinds, _OfAll, EverySearch, total=False):
    """The options of a sweep of sizes as keyword arguments: its own, and those of every search."""


_OPTIONS, _OF_KINDS, _OF_SEARCHES = declared(SizeOptions), declared(_OfKinds), declared(EverySearch)


def size_order(models: Sequence[str], **options: Any) -> SizeOrder:
    """The order that SizeOptions make. Raises UsageError, and TypeError for an option that a sweep does not have."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"size() got an unexpected keyword argument {min(unknown)!r}")
    names = [*dict.fromkeys(models)]
    if not names:
        raise UsageError("name a cost model of each kind of hardware, as analytic:h100 and analytic:b200 (--model)")
    devices, per_device, budget = (
        _OPTIONS[name].checked(options.get(name)) for name in ("devices", "batch_per_device", "time_budget")
    )
    if per_device is not None and options.get("batch_size") is not None:
        raise UsageError("--batch-size fixes the global batch, --batch-per-device that of a device: give one of both")
    given = {name: _by_kind(option, options.get(name), names) for name, option in _OF_KINDS.items()}
    currency = _currency_of(given["price"])
    for name in ("price", "dense_time"):
        if given[name] and (without := [kind for kind in names if kind not in given[name]]):
            flag = _OPTIONS[name].flags[0]
            raise UsageError(f"{flag} is given for some kinds and not for {without[0]}: give it for all, or for none")
    given["price"] = {kind: amount for kind, (amount, _) in given["price"].items()}
    fields = {option.field or name: given[name] for name, option in _OF_KINDS.items()}
    kinds = tuple(Kind(kind, **{field: values.get(kind) for field, values in fields.items()}) for kind in names)
    search = {name: value for name, value in options.items() if name in _OF_SEARCHES}
    return SizeOrder(kinds, devices, per_device, currency, budget, search)


def _currency_of(prices: Mapping[str, tuple[float, str]]) -> str:
    """The one of all prices, which may be empty. Raises UsageError."""
    currencies = sorted({currency for _, currency in prices.values()})
    if len(currencies) > 1:
        said = ", ".join(currency or "none" for currency in currencies)
        raise UsageError(f"prices are in several currencies ({said}), which cannot be compared: give all in one")
    return currencies[0] if currencies else ""


def _by_kind(option: Option, given: object, names: Sequence[str]) -> dict[str, Any]:
    """The value of each kind: its own, else the one for all. Raises UsageError."""
    flag = option.flags[0]
    values: dict[str, Any] = {}
    for text in take.several(flag, () if given is None else given):
        kind, equals, value = text.rpartition("=")
        if equals and kind not in names:
            raise UsageError(
                f"{flag} {shown(text)}: {shown(kind)} is not among the models; they are {', '.join(names)}"
            )
        key = kind if equals else ""
        if key in values:
            raise UsageError(f"{flag} is given twice for {key or 'all kinds'}: {shown(text)}")
        try:
            values[key] = option.reads(value)
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from None
    return {name: values[key] for name in names for key in (name if name in values else "",) if key in values}


def _texts(given: Any) -> Any:
    """What YAML has for one text or several: 8, "8", or a list of them."""
    parts = given if isinstance(given, list | tuple) else [given]
    return [str(part) if isinstance(part, int) and not isinstance(part, bool) else part for part in parts]


_Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class NightlySizes(Value):
    """`size` of a model of models.yaml: a sweep after the model's plan of the night, by the options of `neuroshard size`.

    `models` are datasheets (`analytic:h100`), and hardware by its name (`h200`), whose live cost model in the night's store is
    taken; without any it is the model's own hardware.
    """

    devices: _Texts
    models: _Texts = ()
    memory: _Texts = ()
    host_memory: _Texts = ()
    domain: _Texts = ()
    local_world_size: _Texts = ()
    network: str | None = None
    price: _Texts = ()
    dense_time: _Texts = ()
    batch_per_device: Annotated[Whole, Field(ge=1)] | None = None
    time_budget: str = "5m"  # a guess: 26 tables, eight kinds and eight sizes take a minute of CPU time

    def order(self, hardware: str, search: Mapping[str, Any], *, batch_size: int, store: str) -> SizeOrder:
        """The order of a model on this `hardware`, whose kinds have names as `--model` takes them. Raises UsageError."""
        names = self.models or ((hardware,) if hardware else ())
        if not names:
            raise UsageError("name the hardware of the sizes: models: [h200, analytic:b200]")
        for name in names:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"models {shown(name)} is neither a datasheet (analytic:h100) nor hardware of the night's store (h200)"
                )
        own = {name: value for name, value in self if name != "models" and value is not None}
        batch = {} if self.batch_per_device else {"batch_size": batch_size}
        found = size_order(names, **{**search, **batch, **own})
        kinds = (
            kind if kind.name.startswith("analytic:") else replace(kind, name=f"{store}#{kind.name}")
            for kind in found.kinds
        )
        return replace(found, kinds=tuple(kinds))
