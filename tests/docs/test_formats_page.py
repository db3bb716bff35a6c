"""The tables of fields in docs/formats.md are what its types say, and operating.md names every key of models.yaml."""

import importlib.util
import re
from pathlib import Path

from neuroshard.orders.nightly import ModelSpec

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("fields_of_formats", DOCS / "fields.py")
assert SPEC
assert SPEC.loader
fields = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fields)


def test_tables_of_fields_are_those_of_the_types_and_every_field_has_a_meaning() -> None:
    page = (DOCS / "formats.md").read_text()
    assert fields.rendered(page) == page, "run python docs/fields.py"
    assert re.findall(r"^\| `(\w+)` \|.*\|  \|$", page, re.M) == []


def test_the_guide_has_every_key_of_a_model() -> None:
    keys = (DOCS / "operating.md").read_text().partition("| key | what it is |")[2].partition("\n\n")[0]
    firsts = [row.split("|")[1] for row in keys.splitlines() if "`" in row]
    assert sorted(re.findall(r"`(\w+)`", "".join(firsts))) == sorted(ModelSpec.model_fields)
