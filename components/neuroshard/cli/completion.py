"""What Tab completes as values: of options with few values, and names of built-in cost models and tables."""

import io
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, get_args

import typer

from neuroshard.core.precision import Precision
from neuroshard.core.sharding import ShardingTypeName
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import ELEMENT_BYTES, OPTIMIZER_BYTES, DenseOptimizer
from neuroshard.orders.options import ALGORITHMS, AUTO

BREAKS = {":", "="}  # between which bash breaks words
COMPLETING = "_NEUROSHARD_COMPLETE"  # typer's variable: which shell asks


def _models() -> list[str]:
    from neuroshard.costmodel.analytic import DATASHEETS

    return [f"analytic:{name}" for name in DATASHEETS]


def _presets() -> list[str]:
    from neuroshard.files.importers.presets import PRESETS

    return list(PRESETS)


VALUES: Mapping[str, Callable[[], list[str]]] = {
    "algorithm": lambda: list(ALGORITHMS),
    "backend": lambda: ["synthetic", "cpu", "cuda"],
    "collective_precision": lambda: list(get_args(Precision)),
    "data_parallel": lambda: [AUTO],
    "dense_optimizer": lambda: list(get_args(DenseOptimizer)),
    "dtype": lambda: list(ELEMENT_BYTES),
    "group_size": lambda: [AUTO],
    "model": _models,
    "optimizer": lambda: list(OPTIMIZER_BYTES),
    "pipeline": lambda: list(get_args(Pipeline)),
    "preset": _presets,
    "rows_by_access": lambda: [AUTO, "no"],
    "sharding_types": lambda: list(get_args(ShardingTypeName)),
}


def complete_values(annotations: Mapping[str, Any]) -> None:
    """Let Tab complete the values of those options of a subcommand (by the names of its parameters) that have `VALUES`."""
    for name, annotation in annotations.items():
        for option in getattr(annotation, "__metadata__", ()):
            if name in VALUES and isinstance(option, typer.models.OptionInfo):
                option.autocompletion = _beginning(VALUES[name])


def _beginning(values: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    def completed(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return completed


@contextmanager
def words_as_typed(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Bash takes `analytic:h100` and `--model=ana` for three words each, of which it completes the last: during the block they
    are one, and what the block prints loses what bash has already."""
    words = environ.get("COMP_WORDS", "").split("\n")
    current = int(environ.get("COMP_CWORD", "0") or 0)
    if environ.get(COMPLETING) != "complete_bash" or not BREAKS.intersection(words[: current + 1]):
        yield
        return
    joined: list[str] = []
    place = 0
    for index, word in enumerate(words):
        if joined and (word in BREAKS or words[index - 1] in BREAKS):
            joined[-1] += word
        else:
            joined.append(word)
        if index <= current:
            place = len(joined) - 1
    if current >= len(words) and words[-1] not in BREAKS:  # a word is about to begin
        place = len(joined)
    there = joined[place] if place < len(joined) else ""
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(joined), str(place)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        value = there.partition("=")[2] if there.startswith("-") else there
        cut = value[: value.rfind(":") + 1]
        print(*(line.removeprefix(cut) for line in printed.getvalue().splitlines()), sep="\n")
