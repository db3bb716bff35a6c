"""The front door for Python users: what `import neuroshard as ns` offers. docs/python.md is the tour.

    sources.py    tables(...): a preset, a file, a model or a DataFrame -> Tables
    plans.py      search, price, diff, report, load_plan, deploy
    misses.py     cache: what a cache in HBM misses
    sizes.py      size: how many devices, and which
    results.py    what these return, and how it shows itself in a notebook

Each verb takes what its subcommand takes, amounts as text, and calls the function that the subcommand calls. Heavy packages
are imported by the verb that needs them.
"""

from neuroshard.api.misses import Cache, cache
from neuroshard.api.plans import deploy, diff, load_plan, price, report, search
from neuroshard.api.results import Deployment, Diff, Price, Report, Tables
from neuroshard.api.sizes import Sizes, size
from neuroshard.api.sources import tables
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

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
