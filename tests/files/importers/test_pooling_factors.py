"""Lookups a sample, from options and files."""

import pytest

from neuroshard.files.importers.tables_source import pooling_factors


@pytest.mark.parametrize(
    ("name", "text"), [("f.json", '{"a": 2, "b=c": 0.5}'), ("f.csv", "name,pooling_factor\na,2\nb=c, 0.5\n")]
)
def test_json_and_csv_say_the_same_and_options_win(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert pooling_factors(path, ["a=7"]) == {"a": 7.0, "b=c": 0.5}
