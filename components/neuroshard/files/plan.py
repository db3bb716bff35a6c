"""plan.json, read and written."""

from pathlib import Path

from neuroshard.core.plan import Plan
from neuroshard.files.disk import read_bytes, write_bytes


def read_plan(path: Path) -> Plan:
    """A plan, checked whole. Raises InvalidInput or NewerFormat in one line."""
    return Plan.from_json(read_bytes(path), str(path))


def write_plan(path: Path, plan: Plan) -> None:
    """The plan as canonical JSON, whole or not at all: the bytes that its digest is of. Raises InvalidInput where no reader would
    take it."""
    write_bytes(path, plan.read_back().canonical_json())
