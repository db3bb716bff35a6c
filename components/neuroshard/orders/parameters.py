"""What each parameter of the nightly pipeline may be. All of them are checked together, before anything is measured."""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from neuroshard.core.cost import BACKENDS
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.release import HARDWARE
from neuroshard.core.store_url import parse_store_url
from neuroshard.core.units import parse_duration
from neuroshard.core.value import shown
from neuroshard.orders import values as take
from neuroshard.orders.nightly import MAX_BATCH_SIZE, MAX_CASES, MAX_PODS, MAX_SEED, read_specs
from neuroshard.orders.options import LOCAL_SEARCH, OPTIONS

PARALLELISM = "parallelism"  # a setting of the package; KFP fixes it when compiling, so it is no parameter of a run
MAX_PARALLELISM = 10_000
MAX_LABEL = 63  # of a name in Kubernetes
FINGERPRINT_LENGTH = 17  # with the dash before it
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]+)?")
# what its suffixes stand for; an exponent may stand in their place
FACTORS = (
    {"m": 1e-3}
    | {p: 1000**n for n, p in enumerate("kMGTPE", 1)}
    | {f"{p}i": 1024**n for n, p in enumerate("KMGTPE", 1)}
)
MOST_QUANTITY = 2**62
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")

Check = Callable[[str, Any], object]  # of how a line on the value begins, and the value; raises a NeuroshardError


def quantity(text: str) -> int:
    """A valid amount as Kubernetes writes it (128Gi, 500m, 1e9), as a whole number."""
    number, suffix = text.rstrip("".join(FACTORS)), text.lstrip("0123456789.")
    return int(min(float(number) * FACTORS[suffix] if suffix in FACTORS else float(text), MOST_QUANTITY))


def check_parameters(given: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid parameters: a sentence for each, with its name, its value and what it must be.

    `given` may lack some of them, which have their defaults. What only the store, the cluster or a file can show is not
    covered.
    """
    if lines := faults(given):
        raise UsageError("; ".join(lines))


def faults(given: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each invalid parameter, in the order of `given`."""
    lines = []
    for name, value in given.items():
        try:
            CHECKS[name](f"{name}:", value)
        except NeuroshardError as error:
            text = str(error)
            lines.append(text if text.startswith(name) else f"{name}: {text}")
        except KeyError:
            known = ", ".join(sorted([*CHECKS, PARALLELISM]))
            lines.append(f"{shown(name)} is no parameter of the pipeline; there are {known}")
    return tuple(lines) or _contradictions(given)


def _contradictions(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines on valid parameters that contradict each other."""
    algorithm = given.get("algorithm", LOCAL_SEARCH)
    if algorithm == LOCAL_SEARCH or "models" not in given:
        return ()
    return tuple(
        f"algorithm: {algorithm} places all tables anew, so model {spec.name!r} can have no "
        f"{spec.starts_from_live}; leave it out, or take {LOCAL_SEARCH}"
        for spec in read_specs(given["models"])
        if spec.starts_from_live
    )


def _models(_: str, value: Any) -> None:
    for spec in read_specs(_text(value)):
        if spec.name == HARDWARE:
            raise UsageError(
                f"no model can be called {HARDWARE!r}: cost models are kept under that name; choose another"
            )
        if not spec.tables.strip():
            raise UsageError(f"model {spec.name!r} has no tables; give a preset, a file, or s3://bucket/tables.json")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be text, not {shown(value)}; quote it where it is YAML")
    return value


def _number(what: str, holds: Callable[[float], bool]) -> Check:
    def check(_: str, value: Any) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not holds(value):
            raise UsageError(f"must be {what}, not {shown(value)}")

    return check


def _matches(pattern: re.Pattern[str], what: str, *, longest: int = 1000, may_be_empty: bool = False) -> Check:
    def check(_: str, value: Any) -> None:
        text = _text(value)
        fits = len(text) <= longest and text.isprintable() and bool(pattern.fullmatch(text))
        if not fits and not (may_be_empty and not text):
            raise UsageError(f"must be {what}, not {shown(value)}")

    return check


def _node_selector(_: str, value: Any) -> None:
    labels = _json(value)
    if not isinstance(labels, dict) or not all(isinstance(label, str) for label in labels.values()):
        raise UsageError(f'must be a JSON object of labels, as in {{"node-pool": "train"}}, not {shown(value)}')


def _tolerations(_: str, value: Any) -> None:
    listed = _json(value)
    fits = isinstance(listed, list) and all(isinstance(one, dict) for one in listed)
    for toleration in listed if fits else ():
        fits = fits and toleration.get("operator", "Equal") in ("Equal", "Exists")
        fits = fits and toleration.get("effect", "") in ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
        fits = fits and (bool(toleration.get("key")) or toleration.get("operator") == "Exists")
    if not fits:
        example = '[{"key": "nvidia.com/gpu", "operator": "Exists"}]'
        raise UsageError(f"must be a JSON list of Kubernetes tolerations, as in {example}, not {shown(value)}")


def _json(value: Any) -> Any:
    try:
        return json.loads(_text(value))
    except (ValueError, RecursionError):
        return None


_quantity = _matches(QUANTITY, "an amount as Kubernetes writes it, as in 16, 500m or 128Gi")
_memory = _matches(
    re.compile(rf"(?![0-9]{{1,6}}$)({QUANTITY.pattern})"), "an amount of memory as Kubernetes writes it, as in 128Gi"
)
_image = _matches(IMAGE, "the name of an image, as in registry/neuroshard-gpu:0.1.0")

CHECKS: Mapping[str, Check] = {
    "models": _models,
    "store": lambda _, value: parse_store_url(_text(value)),
    "backend": partial(take.one_of, names=BACKENDS),
    "batch_size": partial(take.whole, least=1, most=MAX_BATCH_SIZE),
    "compute_cases": partial(take.whole, least=1, most=MAX_CASES),
    "collective_cases": partial(take.whole, least=0, most=MAX_CASES),
    "measure_budget": lambda _, value: parse_duration(_text(value)),
    "max_age": lambda _, value: _text(value) and parse_duration(value),
    "max_error": _number("0 for any, or a share above it (0.2 is 20 %)", lambda number: number >= 0),
    "min_gain": _number(
        "below 0 for what predictions are off by, at least 30 % for a datasheet or a fallback; or a share below 1 (0.02 is 2 %)",
        lambda number: number < 1,
    ),
    "memory_margin": _number("a share of at least 0 and below 1 (0.1 is 10 %)", lambda number: 0 <= number < 1),
    "algorithm": OPTIONS["algorithm"].reads,
    "seed": partial(take.whole, least=0, most=MAX_SEED),
    "single_writer": take.switch,
    "nodes": _matches(re.compile(r".+"), "the path of a file, or empty", longest=4000, may_be_empty=True),
    "node_selector": _node_selector,
    "tolerations": _tolerations,
    "pods": partial(take.whole, least=1, most=MAX_PODS),
    "training_runtime": _matches(
        LABEL,
        "the beginning of a TrainingRuntime's name (lower-case letters, digits and dashes), or empty",
        longest=MAX_LABEL - FINGERPRINT_LENGTH,
        may_be_empty=True,
    ),
    "measure_cpus": _quantity,
    "measure_memory": _memory,
    "measure_image": _image,
    "step_cpus": _quantity,
    "step_memory": _memory,
    "step_image": _image,
    "store_secret": _matches(SUBDOMAIN, "the name of a secret", longest=253, may_be_empty=True),
}
