"""Built-in table sets (presets.toml, with their sources). `preset("mlperf-dlrm-dcnv2")` -> tables."""

import tomllib
from pathlib import Path
from typing import Any

from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.files.importers.imported import table_defaults

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())


def preset(
    name: str, *, access: str = "uniform", dtype: str = "fp32", optimizer: str = "rowwise_adagrad"
) -> tuple[Table, ...]:
    """The tables of a preset, which may say for itself how some are read. Raises UsageError that lists the known ones."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    said, defaults = PRESETS[name], table_defaults(access=access, dtype=dtype, optimizer=optimizer)
    of_all = {key: value for key, value in said.items() if key not in ("names", "tables")}
    tables = ({"name": f"{said.get('names')}{number}", **of_all, **own} for number, own in enumerate(said["tables"]))
    return tuple(defaults.table(fields, fields["name"]) for fields in tables)
