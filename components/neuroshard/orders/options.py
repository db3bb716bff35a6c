"""Every option of a search, declared once.

`neuroshard search`, `neuroshard.search(...)` with its help, models.yaml and `SearchOrder` are made from `SearchOptions`. Type
checkers read it as keyword arguments. A new option is declared here, and read by what it is for: a field of ShardingTask, of
SearchSettings or of ConstraintsFile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from neuroshard.core.constraints import check_simplicity
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.precision import CollectivePrecision, parse_precision
from neuroshard.core.step_memory import DEFAULT_PIPELINE, Pipeline
from neuroshard.core.table import DenseOptimizer, check_dense_optimizer
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.units import parse_bytes, parse_duration
from neuroshard.core.value import shown
from neuroshard.orders import values as take
from neuroshard.orders.values import FilePath

LOCAL_SEARCH, PUBLISHED = "local-search", "neuroshard-2023"
ALGORITHMS = (LOCAL_SEARCH, PUBLISHED, "random", "size", "dim", "lookup", "size-lookup")
AUTO = "auto"  # the search chooses the data-parallel tables

Amount = str | float
Part = Literal["task", "settings", "constraints"]


@dataclass(frozen=True)
class Option:
    """One option of a search.

    `help` says what it does, in the words of the command line. `reads` is what makes the value of an order of any that is given:
    int (from `least` to `most`), bool, Path, list[str] for what may be repeated; else a function of the option's name and the
    value, which raises UsageError. `word` stands for the value in help, and says its unit. `part` is the part of an order that
    has the value, as `field` if its name there is another; an option of no part is read together with others (search.py).
    A model of models.yaml may have the option if `models_yaml` is True, or a type of pydantic's: what it may be there.
    """

    help: str
    reads: Any
    word: str = "NUMBER"
    default: Any = None
    least: int | None = None
    most: int | None = None
    flag: str = ""
    part: Part | None = None
    field: str = ""
    models_yaml: Any = False
    text_is: Any = None  # what the command line makes of the text where `reads` does not say it
    name: str = ""  # and the following: from the declaration
    python: Any = None
    required: bool = False

    @property
    def kind(self) -> Any:
        """What the command line makes of the text: int, bool, Path, list[str], or str."""
        return self.text_is or (self.reads if self.reads in _TAKES else str)

    def checked(self, value: Any) -> Any:
        """The value as an order has it; None where none is given. Raises UsageError."""
        if value is None and self.default is None and not self.required:
            return None
        if self.reads is int:
            return take.whole(self.name, value, self.least, self.most)
        return _TAKES.get(self.reads, self.reads)(self.name, value)


_TAKES: Mapping[Any, Callable[[str, Any], Any]] = {
    int: take.whole,
    bool: take.switch,
    Path: take.path,
    list[str]: take.several,
}
_task = partial(Option, part="task")
_setting = partial(Option, part="settings")
_rule = partial(Option, part="constraints")
_rules = partial(_rule, reads=list[str], default=())


def _word(name: str, value: object) -> str:
    return take.name(name, value, "a word")


def _algorithm(name: str, value: object) -> str:
    word = take.name(name, value, "the name of one")
    if word not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {word!r}; there are {', '.join(ALGORITHMS)}")
    return word


def _pipeline(name: str, value: object) -> str:
    word, known = _word(name, value), get_args(Pipeline)
    if word not in known:
        raise UsageError(f"{name}: {shown(word)} is none of {', '.join(known)}")
    return word


def _precision(name: str, value: object) -> CollectivePrecision | None:
    return parse_precision(_word(name, value))


def _dense_optimizer(name: str, value: object) -> DenseOptimizer:
    return check_dense_optimizer(_word(name, value))


def _seconds(name: str, value: object) -> float:
    return parse_duration(take.amounts(name, value, "'30s'"))


def _bytes(name: str, value: object) -> int:
    return parse_bytes(take.amounts(name, value, "'50GiB'"), least=0)


def _some_bytes(name: str, value: object) -> int:
    text = take.amounts(name, value, "'1TiB'")
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _simplicity(name: str, value: object) -> float:
    share = take.portion(name, value)
    check_simplicity(share)
    return share


def _previous(name: str, value: object) -> Plan | Path:
    return value if isinstance(value, Plan) else take.plan_file(name, value)


def _amounts(example: str) -> Callable[[str, Any], str]:
    return partial(take.amounts, example=example)


class _Needed(TypedDict):
    devices: Annotated[int, Option("Number of devices.", int, least=1, most=MAX_DEVICES, models_yaml=True)]
    memory: Annotated[
        Amount | Sequence[Amount],
        Option(
            "Memory of a device: bytes or a unit (32GiB); one for all, or one per device, separated by commas.",
            _amounts("'80GiB'"),
            "SIZE",
            models_yaml=True,
        ),
    ]


class SearchOptions(_Needed, total=False):
    """The options of a search as keyword arguments. `OPTIONS` has them by name."""

    algorithm: Annotated[
        str,
        _setting(
            "local-search, neuroshard-2023 (the published search), random, size, dim, lookup or size-lookup.",
            _algorithm,
            "WORD",
            LOCAL_SEARCH,
        ),
    ]
    host_memory: Annotated[
        Amount | None,
        _task(
            "Memory of a host for tables that HBM does not hold: they are cached, or in host memory [default: none; all in HBM].",
            _some_bytes,
            "SIZE",
            field="host_memory_bytes",
            models_yaml=True,
        ),
    ]
    batch_size: Annotated[int | None, _task("Samples a step [default: the cost model's].", int, least=1)]
    rounds: Annotated[int | None, _setting("Rounds of improvement [default: 40].", int, least=0)]
    time_budget: Annotated[
        Amount | None,
        _setting(
            "Search for this long instead: 10s, 2m, from reading tables and cost model to the last improvement; the bound and "
            "the heuristics' plans come after. The plan then depends on the machine.",
            _seconds,
            "TIME",
            field="time_budget_s",
        ),
    ]
    constraints: Annotated[
        FilePath | None,
        Option("constraints.json: pins, tables kept together, least widths (docs/formats.md).", Path, "FILE"),
    ]
    pipeline: Annotated[
        str,
        _task(
            "The trainer's pipeline, by which a step needs memory: none, sparse-dist or prefetch.",
            _pipeline,
            "WORD",
            DEFAULT_PIPELINE,
            models_yaml=Pipeline,
        ),
    ]
    domain: Annotated[
        int | None,
        Option(
            "Ranks that share fast links (NVLink) [default: those of a host, if given].",
            int,
            least=1,
            most=MAX_DEVICES,
            models_yaml=True,
        ),
    ]
    local_world_size: Annotated[
        int | None,
        Option(
            "Ranks of a host [default: those of a domain, if given].", int, least=1, most=MAX_DEVICES, models_yaml=True
        ),
    ]
    network: Annotated[
        str | Sequence[str] | None,
        Option(
            "What a rank can send to other domains, as `neuroshard network` prints it: 400Gb/s, or 50GB/s,0.06ms "
            "[default: by the hardware's datasheet].",
            _amounts("'400Gb/s' or '50GB/s,0.06ms'"),
            "RATE",
            models_yaml=True,
        ),
    ]
    collective_precision: Annotated[
        str | None,
        _task(
            "Precision of outputs and gradients between ranks: fp16, bf16 or int8; one for each: fp16:bf16 [default: fp32].",
            _precision,
            "WORD",
            models_yaml=True,
        ),
    ]
    dense_optimizer: Annotated[
        str | None,
        _task(
            "The trainer's dense optimizer, which trains data-parallel tables: sgd, momentum, adagrad, adam and others; "
            "memory counts its state [default: adam].",
            _dense_optimizer,
            "WORD",
            models_yaml=DenseOptimizer | None,
        ),
    ]
    reserve: Annotated[
        Amount | None,
        _rule(
            "Memory of every device that is not for tables: 2GiB, or 15% of it.", _amounts("'2GiB' or '15%'"), "SIZE"
        ),
    ]
    min_dim: Annotated[int | None, _rule("Fewest columns of a shard, a multiple of 4 [default: 4].", int)]
    max_shards: Annotated[int | None, _rule("Most shards of a table.", int)]
    never_split: Annotated[
        Sequence[str], _rules("Tables (a name or a pattern) that stay whole; may be repeated.", word="TABLE")
    ]
    row_wise: Annotated[
        Sequence[str],
        _rules(
            "Tables that may be split row-wise, over all devices or a domain's; '*' for all; may be repeated [default: all].",
            word="TABLE",
        ),
    ]
    data_parallel: Annotated[
        Sequence[str],
        _rules(
            "Copy this table (a name or a pattern) to every device; auto copies small ones where that pays; may be repeated.",
            word="TABLE",
            models_yaml=Literal["", "auto"],
        ),
    ]
    no_row_wise: Annotated[bool, _rule("Split no table row-wise.", bool, default=False)]
    sharding_types: Annotated[
        str | Sequence[str] | None,
        _rule(
            "Types to use besides table-wise: column-wise,row-wise, and over domains table-row-wise,grid [default: all].",
            _amounts("'column-wise,row-wise'"),
            "TYPES",
        ),
    ]
    pin: Annotated[
        Sequence[str],
        _rules("Devices that may hold tables: 'user_*=0,1', or user_id=host:2; may be repeated.", word="TABLE=DEVICES"),
    ]
    together: Annotated[
        Sequence[str],
        _rules("Tables to keep on one device: user_id,user_history; may be repeated.", word="TABLES"),
    ]
    previous: Annotated[
        Plan | FilePath | None, Option("plan.json to start from.", _previous, "FILE", flag="--from", text_is=Path)
    ]
    move_budget: Annotated[
        Amount | None,
        _setting(
            "With --from: most weights and optimizer state to move: 50GiB; 0 to move nothing.",
            _bytes,
            "SIZE",
            field="move_budget_bytes",
            models_yaml=True,
        ),
    ]
    keep_optimizer_state: Annotated[
        bool,
        _setting(
            "With --from: keep the column cuts of tables with row-wise optimizer state, so that the state can be loaded.",
            bool,
            default=False,
            models_yaml=True,
        ),
    ]
    simplicity: Annotated[
        Amount,
        _setting(
            "Most that a plan may cost above the cheapest to have fewer cuts; 0 takes the cheapest.",
            _simplicity,
            "SHARE",
            "0.5%",
            models_yaml=True,
        ),
    ]
    seed: Annotated[int, _setting("Seed of all random choices.", int, default=0, least=0, most=2**31 - 1)]


def _declared() -> Mapping[str, Option]:
    found = {}
    for name, declared in get_type_hints(SearchOptions, include_extras=True).items():
        python, option = get_args(declared)
        found[name] = replace(option, name=name, python=python, required=name in SearchOptions.__required_keys__)
    return MappingProxyType(found)


OPTIONS = _declared()
