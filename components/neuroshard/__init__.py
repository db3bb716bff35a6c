"""NeuroShard: measure embedding-table costs, learn them, and search sharding plans ("pre-train, and search").

    import neuroshard as ns

    plan = ns.search(ns.tables("mlperf-dlrm-dcnv2"), "analytic:h100", devices=8, memory="32GiB", batch_size=65536)
    ns.report(plan, model="analytic:h100").save("report.html")

`__all__` is all that is public here; docs/python.md is the tour. Nothing is imported before it is used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuroshard.api import *  # what type checkers see

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "Deployment",
    "Diff",
    "NeuroshardError",
    "Plan",
    "Price",
    "Report",
    "Sizes",
    "Table",
    "Tables",
    "__version__",
    "cache",
    "deploy",
    "diff",
    "load_plan",
    "price",
    "report",
    "search",
    "size",
    "tables",
]
_ROOMS = ("deploy", "report", "search", "size")  # verbs that are packages as well


class _Room(ModuleType):
    """A package that can be called: `neuroshard.search(...)`, and still `import neuroshard.search.run`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)

    @property
    def __wrapped__(self) -> Any:
        """The verb: help and completion take its signature."""
        return getattr(import_module("neuroshard.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self.__wrapped__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # nobody writes it
        """The verb's, after its signature, an argument a line, which `help` shows of functions alone."""
        first, _, more = str(self.__wrapped__.__doc__).partition("\n\n")
        given = self.__signature__.parameters.values()
        by_name = [one for one in given if one.kind is one.KEYWORD_ONLY]
        shown = [*(one for one in given if one not in by_name), "*", *by_name]
        arguments = "".join(f"        {one},\n" for one in shown)
        returned = self.__signature__.return_annotation
        return f"{first}\n\n    {self.__wrapped__.__name__}(\n{arguments}    ) -> {returned}\n\n{more}"


class _Face(ModuleType):
    """This module. Python binds a package to its parent's name once it is imported: then it becomes one that can be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and type(value) is ModuleType:
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"neuroshard.{name}")
    if name in __all__:
        return getattr(import_module("neuroshard.api"), name)
    raise AttributeError(f"module 'neuroshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
