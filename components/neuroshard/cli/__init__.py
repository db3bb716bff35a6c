"""The command line: one command, `neuroshard`, one subcommand a room.

Errors end in one line on stderr and exit code 1 (the world: a broken file, a store that denies) or 2 (usage). Rooms are
imported when their subcommand runs, so that `--help` and `show` answer at once.
"""

from neuroshard.cli.app import app, main  # isort: skip  # first, since it says what is missing

# In this order the list of commands shows them.
from neuroshard.cli import machines, tables, costs, models, plans, releases, cluster  # isort: skip

__all__ = ["app", "cluster", "costs", "machines", "main", "models", "plans", "releases", "tables"]
