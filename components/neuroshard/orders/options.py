"""Options, each declared once: its type, what it does, its unit, bounds and default.

Commands, their help and completion, the Python API and models.yaml are made from declarations: of a class of keyword arguments
(a TypedDict), or of a stage's settings (a dataclass), where a field is `Annotated[type, help, Option(...)]`. Type checkers read
both as what they are.

Those of a search are `SearchOptions`, below. A new one is declared there, and read by what it is for: a field of ShardingTask,
of SearchSettings or of ConstraintsFile.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from pydantic import BeforeValidator, Field

from neuroshard.core.constraints import check_simplicity
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.precision import Precision, parse_precision
from neuroshard.core.sharding import ShardingTypeName
from neuroshard.core.step_memory import (
    ALLOCATOR_SHARE,
    DEFAULT_PIPELINE,
    Pipeline,
    PipelineOption,
    check_allocator_share,
    parse_pipeline_options,
)
from neuroshard.core.table import DenseOptimizer, check_dense_optimizer
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.units import parse_bytes, parse_counts, parse_step_time
from neuroshard.core.value import MOST_DIGITS, Switch, Whole, shown
from neuroshard.orders import values as take
from neuroshard.orders.values import FilePath

LOCAL_SEARCH, PUBLISHED = "local-search", "neuroshard-2023"
ALGORITHMS = (LOCAL_SEARCH, PUBLISHED, "random", "size", "dim", "lookup", "size-lookup")
AUTO, ON_OFF = "auto", ("auto", "on", "off")  # auto: the search chooses

Amount = str | float
T = TypeVar("T")
_Ranks = Annotated[Whole, Field(ge=1, le=MAX_DEVICES)]
# a share in models.yaml, where 0 and 0.1 are numbers; what has a unit is text there, for a number lacks it
_Share = Annotated[str, BeforeValidator(lambda given: str(given) if take.is_number(given) else given)]
Part = Literal["task", "settings", "constraints"]


@dataclass(frozen=True)
class Option:
    """One option.

    `help` says what it does, in the words of the command line. `reads` is what makes the value of an order of any that is given:
    int or float (from `least` to `most`), bool, Path, list[str] for what may be repeated; else a function of the option's name
    and the value, which raises UsageError. `word` stands for the value in help, and says its unit. `default` is as the command
    line shows it; without one it is the field's. Tab completes `choices`.

    Of a search: `part` is the part of an order that has the value, as `field` if its name there is another; an option of no part
    is read together with others (search.py). `models_yaml` is its type in a model of models.yaml, if it may be there, where empty
    text is as if it were absent.
    """

    reads: Any
    word: str = "NUMBER"
    default: Any = None
    least: float | None = None
    most: float | None = None
    flag: str = ""  # or several: "-n --count"; --the-name without one
    part: Part | None = None
    field: str = ""
    models_yaml: Any = None
    # what the command line makes of the text: int, float, bool, Path, list[str], or str; as `reads` unless given
    kind: Any = None
    choices: Collection[str] = ()
    envvar: str | None = None
    name: str = ""  # this and what follows is read from the declaration
    help: str = ""
    python: Any = None
    required: bool = False

    @property
    def flags(self) -> Sequence[str]:
        return self.flag.split() or [f"--{self.name.replace('_', '-')}"]

    def checked(self, given: Any, said: str = "") -> Any:
        """The value as an order has it, by default if none is given. Raises UsageError, by the name or what is `said` for it."""
        value = self.default if given is None else given
        if value is None and not self.required:
            return None
        if self.reads is int:
            return take.whole(said or self.name, value, self.least, self.most)
        return _TAKES.get(self.reads, self.reads)(said or self.name, value)


_TAKES: Mapping[Any, Callable[[str, Any], Any]] = {
    int: take.whole,
    float: take.number,
    str: lambda _, text: text,
    bool: take.switch,
    Path: take.path,
    list[str]: take.several,
}
_task = partial(Option, part="task")
_setting = partial(Option, part="settings")
_rule = partial(Option, part="constraints")
_rules = partial(_rule, reads=list[str], default=())


def _then(takes: Callable[[str, Any], T], parse: Callable[[T], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: parse(takes(name, value))


def _amount(example: str, parse: Callable[[str], T]) -> Callable[[str, Any], T]:
    """What takes a text with its unit, and names the option where that is none."""

    def taken(name: str, value: Any) -> T:
        text = take.amounts(name, value, example)
        try:
            return parse(text)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    return taken


def _amounts(example: str) -> Callable[[str, Any], str]:
    return partial(take.amounts, example=example)


_word = partial(take.name, what="a word")
BYTES = _amount("'80GiB'", parse_bytes)


def COUNTS(name: str, text: str) -> tuple[int, ...]:  # noqa: N802 # as the others that options are read by
    return parse_counts(text, name)


Seed = Annotated[int, "Seed of all random choices.", Option(int, default=0, least=0, most=2**31 - 1)]


def _size_of_groups(name: str, value: object) -> int | str:
    """auto, or a number of ranks, as text or not."""
    if isinstance(value, str):
        if value == AUTO:
            return AUTO
        if value.isdecimal() and value.isascii() and len(value) < MOST_DIGITS:
            return take.whole(name, int(value), 2, MAX_DEVICES)
        raise UsageError(f"{name} must be a number of ranks, or auto, not {shown(value)}")
    return take.whole(name, value, 2, MAX_DEVICES)


def _constraints(name: str, value: object) -> Path | Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return Path(take.name(name, value, "the path of a constraints.json, or a mapping as is in one"))


def _pins(name: str, value: object) -> list[str]:
    """As the command line takes them, of a list of such or of a mapping: {"user_*": [0, 1], "user_id": "host:2"}."""
    if not isinstance(value, Mapping):
        return take.several(name, value)
    pins = []
    for table, at in value.items():
        places = [*at] if isinstance(at, list | tuple) else [at]
        if not isinstance(table, str) or any(isinstance(one, bool) or not str(one).strip() for one in places):
            raise UsageError(
                f"{name} is a mapping from tables to devices, as in {{'user_*': [0, 1]}}, not {shown(value)}"
            )
        pins.append(f"{table}={','.join(map(str, places))}")
    return pins


def _previous(name: str, value: object) -> Plan | Path:
    return value if isinstance(value, Plan) else take.plan_file(name, value)


class _Needed(TypedDict):
    devices: Annotated[int, "Number of devices.", Option(int, least=1, most=MAX_DEVICES, models_yaml=_Ranks)]
    memory: Annotated[
        Amount | Sequence[Amount],
        "Memory of a device: bytes or a unit (32GiB); one for all, or one per device, separated by commas.",
        Option(_amounts("'80GiB'"), "SIZE", models_yaml=str),
    ]


class _OfOneSize(TypedDict, total=False):
    algorithm: Annotated[
        str,
        "local-search, neuroshard-2023 (the published search), random, size, dim, lookup or size-lookup.",
        _setting(partial(take.one_of, names=ALGORITHMS), "WORD", LOCAL_SEARCH),
    ]
    host_memory: Annotated[
        Amount | None,
        "Memory of a host for tables that HBM does not hold: they are cached, or in host memory [default: none; all in HBM].",
        _task(_amount("'1TiB'", parse_bytes), "SIZE", field="host_memory_bytes", models_yaml=str | None),
    ]
    time_budget: Annotated[
        Amount | None,
        "Search for this long instead of --rounds: 10s, 2m (a number is seconds), from reading the tables to the last "
        "improvement; the bound comes after. The plan then depends on the machine.",
        _setting(take.duration, "TIME", field="time_budget_s"),
    ]
    dense_time: Annotated[
        str | None,
        "What the dense layers of a step take, forward and backward: 12ms. Where the pipeline is prefetch, rows that caches miss "
        "are fetched meanwhile, and only what takes longer is waited for [default: all is].",
        _task(_amount("'12ms'", parse_step_time), "TIME", field="dense_ms", models_yaml=str | None),
    ]
    domain: Annotated[
        int | None,
        "Ranks that share fast links (NVLink) [default: those of a host, if given].",
        Option(int, least=1, most=MAX_DEVICES, models_yaml=_Ranks | None),
    ]
    local_world_size: Annotated[
        int | None,
        "Ranks of a host [default: those of a domain, if given].",
        Option(int, least=1, most=MAX_DEVICES, models_yaml=_Ranks | None),
    ]


class EverySearch(TypedDict, total=False):
    """The options of a search that are the same of every search of a sweep of sizes."""

    batch_size: Annotated[int | None, "Samples a step [default: the cost model's].", _task(int, least=1)]
    rounds: Annotated[int | None, "Rounds of improvement [default: 40].", _setting(int, least=0)]
    constraints: Annotated[
        FilePath | Mapping[str, Any] | None,
        "constraints.json: pins, tables kept together, least widths (docs/formats.md).",
        Option(_constraints, "FILE", kind=Path),
    ]
    pipeline: Annotated[
        str,
        "The trainer's pipeline, by which a step needs memory: none (a plain loop), or TorchRec's TrainPipelineBase (base), "
        "sparse-dist, sparse-dist-lite, fused-sparse-dist, semi-sync or prefetch.",
        _task(partial(take.one_of, names=get_args(Pipeline)), "WORD", DEFAULT_PIPELINE, models_yaml=Pipeline),
    ]
    dense_memory: Annotated[
        Amount | None,
        "What the dense layers of a rank keep of a step at its peak: 6GiB [default: unknown, and not counted].",
        _task(_amount("'6GiB'", parse_bytes), "SIZE", field="dense_memory_bytes", models_yaml=str | None),
    ]
    allocator_share: Annotated[
        Amount,
        "What CUDA's caching allocator holds beyond the tensors of a step, as a share of them; trainers with "
        "PYTORCH_ALLOC_CONF=expandable_segments:True need less: 10%.",
        _task(_then(take.portion, check_allocator_share), "SHARE", ALLOCATOR_SHARE, models_yaml=_Share),
    ]
    index_dedup: Annotated[
        str,
        "Whether EmbeddingCollections run with use_index_dedup, which sends each distinct id of a rank's batch once: on, off, or "
        "auto: where that is cheaper, of sequences whose access is known.",
        Option(
            partial(take.one_of, names=ON_OFF), "WORD", AUTO, models_yaml=Literal["auto", "on", "off"], choices=ON_OFF
        ),
    ]
    pipeline_options: Annotated[
        str | Sequence[str] | None,
        "What the trainer's TrainPipelineSparseDist sets to free inputs sooner: free_features_storage_early, "
        "clear_data_dist_inputs, enqueue_batch_after_forward; several with commas.",
        _task(
            _then(_amounts("'clear_data_dist_inputs'"), parse_pipeline_options),
            "WORDS",
            models_yaml=str | None,
            choices=get_args(PipelineOption),
        ),
    ]
    network: Annotated[
        str | Sequence[str] | None,
        "What a rank can send to other domains, as `neuroshard network` prints it: 400Gb/s, or 50GB/s,0.06ms "
        "[default: by the hardware's datasheet].",
        Option(_amounts("'400Gb/s' or '50GB/s,0.06ms'"), "RATE", models_yaml=str | None),
    ]
    group_size: Annotated[
        int | str | None,
        "Train in groups of so many ranks, each of which holds all tables (TorchRec's DMPCollection); auto takes the cheapest "
        "size [default: all ranks are one group].",
        Option(_size_of_groups, "NUMBER", choices=(AUTO,)),
    ]
    sync_every: Annotated[
        int | None,
        "Steps from one averaging of the replicas of groups to the next, with --group-size [default: 1].",
        Option(int, least=1, most=2**31),
    ]
    collective_precision: Annotated[
        str | None,
        "Precision of outputs and gradients between ranks: fp16, bf16, int8 or fp8; one for each: fp16:bf16 [default: fp32].",
        _task(_then(_word, parse_precision), "WORD", models_yaml=str | None, choices=get_args(Precision)),
    ]
    dense_optimizer: Annotated[
        str | None,
        "The trainer's dense optimizer, which trains data-parallel tables: sgd, momentum, adagrad, adam and others; "
        "memory counts its state [default: adam].",
        _task(
            _then(_word, check_dense_optimizer),
            "WORD",
            models_yaml=DenseOptimizer | None,
            choices=get_args(DenseOptimizer),
        ),
    ]
    reserve: Annotated[
        Amount | None,
        "Memory of every device that is neither for tables nor for a step (dense parameters, CUDA, NCCL): 2GiB, or 15% of it.",
        _rule(_amounts("'2GiB' or '15%'"), "SIZE"),
    ]
    min_dim: Annotated[int | None, "Fewest columns of a shard, a multiple of 4 [default: 4].", _rule(int)]
    max_shards: Annotated[int | None, "Most shards of a table.", _rule(int)]
    never_split: Annotated[
        Sequence[str], "Tables (a name or a pattern) that stay whole; may be repeated.", _rules(word="TABLE")
    ]
    row_wise: Annotated[
        Sequence[str],
        "Tables that may be split row-wise, over all devices or a domain's; '*' for all; may be repeated [default: all].",
        _rules(word="TABLE"),
    ]
    data_parallel: Annotated[
        Sequence[str],
        "Copy this table (a name or a pattern) to every device; auto copies small ones where that pays; may be repeated.",
        _rules(word="TABLE", models_yaml=Literal["", "auto"] | None, choices=(AUTO,)),
    ]
    rows_by_access: Annotated[
        str,
        "auto: copy hot rows of sequences with a row order to every device where that is cheaper; or no. A trainer then needs a "
        "wrapper (docs/rows.md).",
        _setting(
            _then(partial(take.one_of, names=(AUTO, "no")), AUTO.__eq__),
            "WORD",
            "no",
            field="try_rows_by_access",
            models_yaml=Literal["auto", "no"],
            choices=(AUTO, "no"),
        ),
    ]
    no_row_wise: Annotated[bool, "Split no table row-wise.", _rule(bool, default=False)]
    sharding_types: Annotated[
        str | Sequence[str] | None,
        "Types to use besides table-wise: column-wise,row-wise, and over domains table-row-wise,grid [default: all].",
        _rule(_amounts("'column-wise,row-wise'"), "TYPES", choices=get_args(ShardingTypeName)),
    ]
    pin: Annotated[
        Sequence[str] | Mapping[str, int | str | Sequence[int | str]],
        "Devices that may hold tables: 'user_*=0,1', or user_id=host:2; may be repeated.",
        _rules(word="TABLE=DEVICES", reads=_pins, kind=list[str]),
    ]
    together: Annotated[
        Sequence[str], "Tables to keep on one device: user_id,user_history; may be repeated.", _rules(word="TABLES")
    ]
    simplicity: Annotated[
        Amount,
        "Most that a plan may cost above the cheapest, to have fewer cuts or tables beyond HBM, or to end the search.",
        _setting(_then(take.portion, check_simplicity), "SHARE", "0.5%", models_yaml=_Share),
    ]
    seed: Annotated[int, "Seed of all random choices.", _setting(int, default=0, least=0, most=2**31 - 1)]


class SearchOptions(_Needed, _OfOneSize, EverySearch, total=False):
    """The options of a search as keyword arguments. `OPTIONS` has them by name."""

    previous: Annotated[
        Plan | FilePath | None, "plan.json to start from.", Option(_previous, "FILE", flag="--from", kind=Path)
    ]
    move_budget: Annotated[
        Amount | None,
        "With --from: most weights and optimizer state to move: 50GiB; 0 to move nothing.",
        _setting(
            _amount("'50GiB'", partial(parse_bytes, least=0)),
            "SIZE",
            field="move_budget_bytes",
            models_yaml=str | None,
        ),
    ]
    keep_optimizer_state: Annotated[
        bool,
        "With --from: keep the column cuts of tables with row-wise optimizer state, so that the state can be loaded.",
        _setting(bool, default=False, models_yaml=Switch),
    ]


def declared(kind: type) -> Mapping[str, Option]:
    """The options that a class declares, by name; other fields are not the user's."""
    defaults = getattr(kind, "_field_defaults", vars(kind))
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        python, told, option = [*get_args(hint), None, None, None][:3]
        if not isinstance(option, Option):
            continue
        default = defaults.get(name) if option.default is None else option.default
        needed = getattr(kind, "__required_keys__", () if default is not None or name in defaults else (name,))
        choices = option.choices or getattr(option.reads, "keywords", {}).get("names", ())
        of_text = option.kind or (option.reads if option.reads in _TAKES else str)
        more = {"name": name, "help": told, "python": python, "kind": of_text, "required": name in needed}
        found[name] = replace(option, default=default, choices=choices, **more)
    return MappingProxyType(found)


OPTIONS = declared(SearchOptions)


def checked(kind: type, given: Mapping[str, Any], verb: str) -> dict[str, Any]:
    """All options that a class declares, as they are given to a verb or by default, by the names of their fields. Raises
    UsageError, and TypeError for an option that is not among them."""
    options = declared(kind)
    if unknown := given.keys() - options:
        raise TypeError(f"{verb}() got an unexpected keyword argument {min(unknown)!r}")
    return {option.field or name: option.checked(given.get(name)) for name, option in options.items()}


def settings_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """Settings of what is given on the command line, where it is theirs. Raises UsageError."""
    options = [(name, option) for name, option in declared(kind).items() if name in given]
    return kind(**{name: option.checked(given[name], option.flags[-1]) for name, option in options})


def with_options(
    own: Signature, options: Iterable[Option], annotation: Callable[[Option], Any], *, first: bool = False
) -> Signature:
    """The signature of a function that takes its own parameters and, in place of `**options`, each of these as a keyword: those
    that are required before all keywords, the others before the last of its own, or also `first`."""
    more = [
        Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if option.required else option.default,
            annotation=annotation(option),
        )
        for option in options
    ]
    more.sort(key=lambda one: one.default is not Parameter.empty)
    needed = sum(one.default is Parameter.empty for one in more)
    *others, _ = own.parameters.values()
    placed = sum(one.kind is Parameter.POSITIONAL_OR_KEYWORD for one in others)
    keywords, last = others[placed:-1], others[placed:][-1:]
    keywords = [*more[needed:], *keywords] if first else [*keywords, *more[needed:]]
    return own.replace(parameters=[*others[:placed], *more[:needed], *keywords, *last])
