"""The compiled pipeline in this package, and the inputs of a run: parameters, models, settings."""

import io
import json
import math
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import agreeing, one_line
from neuroshard.core.value import Value, canonical_json, decode_json, sha256, shown
from neuroshard.files.constraints import ConstraintsFile, MatchedRule, resolve
from neuroshard.files.disk import read_bytes
from neuroshard.files.importers.presets import PRESETS
from neuroshard.orders import values as take
from neuroshard.orders.nightly import ModelSpec, read_specs
from neuroshard.orders.parameters import MAX_PARALLELISM, PARALLELISM, check_parameters
from neuroshard.orders.sizes import NightlySizes
from neuroshard.size.rows import check_order
from neuroshard.store.tables import load_tables
from neuroshard.submit.steps import cut

PACKAGE = Path(__file__).with_name("neuroshard.yaml")
DEADLINE_SECONDS = 24 * 3600.0  # as long as a run may take; the next night begins then
MAX_BYTES = 2**20  # as much as a ConfigMap holds
# Kubeflow gives a step its inputs as one argument, of which Linux takes 2^17 bytes; what a survey adds to the models is left free
MOST_CARRIED = 96 * 2**10


class RunSettings(NamedTuple):
    """All that distinguishes runs: parameters, account, and what is fixed in the package that is uploaded.

    `parallelism` is the most items of a loop (models, kinds of hardware, measuring pods) at once; 0 for all of them.
    """

    parameters: Mapping[str, Any]
    service_account: str | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    parallelism: int = 0

    def digest(self) -> str:
        """8 hex digits, of the package too."""
        parts = [dict(self.parameters), self.service_account, math.ceil(self.deadline_seconds), self.parallelism]
        return sha256(PACKAGE.read_bytes() + canonical_json(parts))[:8]


@cache
def known_parameters() -> Mapping[str, str]:
    """The pipeline's parameters by name, each with KFP's name of its type."""
    return {name: one["parameterType"] for name, one in _parameters().items()}


def parameter(given: Mapping[str, Any], name: str) -> Any:
    """The value of a parameter of a run: as given, else the pipeline's default."""
    return given.get(name, _parameters()[name].get("defaultValue"))


@cache
def _parameters() -> Mapping[str, Mapping[str, Any]]:
    import yaml

    found: Mapping[str, Any] = next(yaml.safe_load_all(PACKAGE.read_text()))["root"]["inputDefinitions"]["parameters"]
    return found


PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf|infinity)$)[A-Za-z][\w.:/@-]*", re.IGNORECASE)


def kfp_command(experiment: str, parameters: Mapping[str, Any]) -> str:
    """kfp's own command for a run with these parameters.

    It reads each value as JSON and then as a number, and the server refuses what is not of a parameter's type: text that could
    be either has quotes of its own.
    """
    words = ["kfp", "run", "create", "-e", experiment, "-f", str(PACKAGE)]
    for name, value in sorted(parameters.items()):
        is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
        words.append(f"{name}={value if is_plain else json.dumps(value)}")
    return shlex.join(words)


@contextmanager
def packaged(settings: RunSettings) -> Iterator[Path]:
    """A copy of the package with the deadline and the parallelism of `settings`: the deadline also ends endless retries."""
    import yaml

    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    kubernetes = platform["platforms"]["kubernetes"]
    kubernetes["pipelineConfig"] = {
        **kubernetes.get("pipelineConfig", {}),
        "activeDeadlineSeconds": math.ceil(settings.deadline_seconds),
    }
    if settings.parallelism:
        limit_loops(spec, settings.parallelism)
    with tempfile.TemporaryDirectory(prefix="neuroshard-") as folder:
        path = Path(folder, PACKAGE.name)
        path.write_text(yaml.safe_dump_all([spec, platform], sort_keys=False))
        yield path


def limit_loops(spec: Mapping[str, Any], parallelism: int) -> None:
    """Let every loop of a pipeline run at most `parallelism` items at once."""
    pipelines = [one["dag"] for one in (spec["root"], *spec["components"].values()) if "dag" in one]
    for task in (task for dag in pipelines for task in dag["tasks"].values()):
        if "parameterIterator" in task:
            task["iteratorPolicy"] = {"parallelismLimit": parallelism}


def read_parameters(file: Path | None, models: Path | None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters of a run: a YAML mapping, overridden by a YAML list of models, overridden by settings (`store=s3://b/p`).

    Other parameters keep the pipeline's defaults. PARALLELISM may be among them. Raises InvalidInput and UsageError in
    one line.
    """
    given: dict[str, Any] = {}
    if file is not None:
        read = _read(file)
        if not isinstance(read, dict):
            raise InvalidInput(f"{file}: must be a mapping of the pipeline's parameters, not {shown(read)}")
        _check(read, str(file))
        given |= read
    if models is not None:
        try:
            given["models"] = _as_json(_read(models), str(models))
        except (TypeError, ValueError) as error:  # a date; a list that holds itself
            raise InvalidInput(f"{models}: cannot be written as JSON: {error}; quote dates") from None
    where: Path | str | None = models or file
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {shown(setting)} must be NAME=VALUE")
        # text stays as it is: "8" CPUs are text to Kubernetes, but a number to YAML
        value = text if known_parameters().get(name) == "STRING" else _decoded(text, f"--set {name}")
        _check({name: value}, "--set")
        given[name] = value
        if name == "models":
            where = "--set models"
    if "models" in given:
        try:
            _check_models(given)
        except NeuroshardError as error:
            raise InvalidInput(f"{where}: {error}") from None
        check_parameters({name: value for name, value in given.items() if name != PARALLELISM})
    return given


def _check_models(given: Mapping[str, Any]) -> None:
    """Raise what the night would raise of the models after it has measured: constraints that contradict each other or name absent
    devices, a sweep of sizes that no night can make; for unknown keys; and for models that no step could be given."""
    if not isinstance(given["models"], str):
        raise UsageError(
            f"models must be text with JSON, as --models makes of a YAML list, not {shown(given['models'])}"
        )
    specs = _specs(given)
    carried = len(json.dumps(canonical_json([spec.model_dump(mode="json") for spec in specs]).decode()))
    if carried > MOST_CARRIED:
        raise InvalidInput(
            f"{agreeing(len(specs), 'model', 'takes', 'take')} {carried:,} bytes of a step's arguments, and at most "
            f"{MOST_CARRIED:,} may be: submit them in several lists, or say in fewer rules what their constraints say"
        )


def _specs(given: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
    """The models. Raises InvalidInput for all that is wrong, of each model what is so first; UsageError where it is no list."""
    wrong = []
    listed = decode_json(given["models"].encode(), "models")
    for index, written in enumerate(listed if isinstance(listed, list) else ()):
        try:
            _check_model(read_specs(json.dumps([written]))[0], written, given)
        except NeuroshardError as error:
            wrong.append(str(error).replace("models[0]", f"models[{index}]"))
    if wrong:
        raise InvalidInput(cut(wrong))
    return read_specs(given["models"])


def _check_model(spec: ModelSpec, written: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    batch_size = int(parameter(given, "batch_size"))
    where, rules = f"constraints of model {spec.name!r}", spec.rules
    _no_others(written, ModelSpec, f"model {spec.name!r}")
    _no_others(spec.constraints, ConstraintsFile, where)
    for place, rule in enumerate(spec.constraints.get("tables", ())):
        _no_others(rule, MatchedRule, f"{where}: tables[{place}]")
    tables = _tables(spec, rules)
    reserve = max(rules.reserve_share, float(parameter(given, "memory_margin")))
    resolved = resolve(rules.model_copy(update={"reserve_share": reserve}), tables, where)
    task = {**spec.order.task, "tables": tables, "batch_size": batch_size, "constraints": resolved}
    ShardingTask.parse(task, f"model {spec.name!r}")
    if spec.size is not None and (order := spec.sizes(batch_size, "")):
        _no_others(written["size"], NightlySizes, f"size of model {spec.name!r}")
        try:
            check_order(order)
        except UsageError as error:
            raise UsageError(f"size of model {spec.name!r}: {error}") from None


def _tables(spec: ModelSpec, rules: ConstraintsFile) -> Sequence[Table]:
    """The tables of a preset, or of a file that is here too. Those in a store need not be readable from here: then each pattern
    of the rules stands for a table of that name."""
    if spec.tables in PRESETS or ("://" not in spec.tables and Path(spec.tables).is_file()):
        return load_tables(spec.tables)[0]
    patterns = [rule.match for rule in rules.tables] + [name for group in rules.together for name in group]
    return [Table(name=name, rows=2**20, dim=128, pooling_factor=1.0) for name in dict.fromkeys(patterns or ["any"])]


def _no_others(written: Mapping[str, Any], kind: type[Value], where: str) -> None:
    """Unknown keys are typing errors here, since this file is written by hand for this version."""
    if unknown := sorted(str(key) for key in written if key not in kind.model_fields):
        raise InvalidInput(f"{where}: {', '.join(unknown)} is no key of it; there are {', '.join(kind.model_fields)}")


def _check(given: Mapping[str, Any], where: str) -> None:
    """Check what is given but the models, which are checked by the rest."""
    others = {name: value for name, value in given.items() if name not in (PARALLELISM, "models")}
    try:
        if PARALLELISM in given:
            take.whole(f"{PARALLELISM} (0 for no limit)", given[PARALLELISM], 0, MAX_PARALLELISM)
        check_parameters(others)
    except NeuroshardError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _read(path: Path) -> Any:
    data = read_bytes(path, MAX_BYTES)
    try:
        return _decoded(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start})") from None


def _as_json(value: Any, where: str) -> str:
    """The YAML value as JSON. Raises InvalidInput where repeated references (*name) make it too large."""
    text = io.StringIO()
    for piece in json.JSONEncoder().iterencode(value):
        if text.tell() > MAX_BYTES:
            raise InvalidInput(f"{where}: more than {MAX_BYTES:,} characters once its references are expanded")
        text.write(piece)
    return text.getvalue()


def _decoded(text: str, where: str) -> Any:
    """The only document of a YAML text. Raises InvalidInput, also where a key occurs twice: PyYAML would let the last win."""
    import yaml

    class Distinct(yaml.SafeLoader):
        def construct_number(self, node: Any) -> Any:
            """1:30 is 90 and 010 is 8 to YAML 1.1, which nobody means who writes so."""
            value = self.construct_scalar(node)
            if ":" in value or re.match(r"[+-]?0[0-9_]", value):
                base = "60" if ":" in value else "8"
                wrong = f"{shown(value)} is a number to the base {base} in YAML; write it to the base 10, or quote it as text"
                raise yaml.MarkedYAMLError(problem=wrong, problem_mark=node.start_mark)
            is_int = node.tag.endswith(":int")
            return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    twice = f"the key {shown(key.value)} is there twice in one mapping; leave one"
                    raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
            return node

    for tag in ("int", "float"):
        Distinct.add_constructor(f"tag:yaml.org,2002:{tag}", Distinct.construct_number)
    try:
        documents = [one for one in yaml.load_all(text, Loader=Distinct) if one is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        raise InvalidInput(f"{where}: not YAML: {one_line(error, 200)}") from None
    if len(documents) > 1:
        raise InvalidInput(f"{where}: holds {len(documents)} YAML documents; write one, without --- between its parts")
    return documents[0] if documents else None
