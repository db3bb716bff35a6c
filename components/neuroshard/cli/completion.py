"""What Tab completes as values: of options with few values, and names of built-in cost models and tables."""

import io
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout

BREAKS = {":", "="}  # between which bash breaks words
COMPLETING = "_NEUROSHARD_COMPLETE"  # typer's variable: which shell asks


Words = Collection[str] | Callable[[], Collection[str]]  # where finding them takes time, a function


def models() -> list[str]:
    """Cost models that need no file."""
    from neuroshard.costmodel.analytic import DATASHEETS

    return [f"analytic:{name}" for name in DATASHEETS]


def presets() -> list[str]:
    """Built-in tables."""
    from neuroshard.files.importers.presets import PRESETS

    return list(PRESETS)


def completing(words: Words) -> Callable[[str], list[str]]:
    """What completes a word to one of these."""

    def completed(incomplete: str) -> list[str]:
        return [word for word in (words() if callable(words) else words) if word.startswith(incomplete)]

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
