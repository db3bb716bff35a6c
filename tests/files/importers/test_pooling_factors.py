"""Lookups a sample, from options and files."""

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.files.importers.pooling_factors import pooling_factors


@pytest.mark.parametrize(
    ("name", "text"), [("f.json", '{"a": 2, "b=c": 0.5}'), ("f.csv", "name,pooling_factor\na,2\nb=c, 0.5\n")]
)
def test_json_and_csv_say_the_same_and_options_win(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert pooling_factors(path, ["a=7"]) == {"a": 7.0, "b=c": 0.5}


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("f.json", "[1]", ('{"user_id": 3.0}',)),
        ("f.json", '{"a": "many"}', ("a", "'many'")),
        ("f.json", '{"a": "2"}', ("a", "'2'")),
        ("f.csv", "name,pooling_factor\na,many\n", ("a", "'many'")),
        ("f.json", f'{{"a": 1{"0" * 400}}}', ("a",)),
        ("f.json", '{"a": true}', ("a", True)),
        ("f.json", '{"a": 1, "a": 2}', ("'a'", 1, 2)),
        ("f.csv", "table,lookups\n", ("name,pooling_factor", "['table', 'lookups']")),
        ("f.csv", "name,pooling_factor\na\n", ("line 2", "1 cells")),
        ("f.csv", "name,pooling_factor\na,1\na,2\n", ("a",)),
        ("f.csv", "name,pooling_factor\na,-1\n", ("a", -1)),
        ("f.csv", "name,pooling_factor\na,1_000\n", ("a", "'1_000'")),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, facts):
    path = tmp_path / name
    path.write_text(text)
    with refused(InvalidInput, path, *facts):
        pooling_factors(path, [])


@pytest.mark.parametrize("number", ["1_000", "nan", "inf", "١"])
def test_what_only_python_takes_for_a_number_is_refused(number):
    with refused(InvalidInput, "a", number):
        pooling_factors(None, [f"a={number}"])


def test_an_option_that_is_no_pair_is_refused():
    with refused(UsageError, "NAME=LOOKUPS"):
        pooling_factors(None, ["3.0"])
