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
    ("name", "text", "words"),
    [
        ("f.json", "[1]", "expected an object of lookups by name"),
        ("f.json", '{"a": "many"}', "a has 'many' lookups"),
        ("f.json", '{"a": "2"}', "a has '2' lookups"),
        ("f.csv", "name,pooling_factor\na,many\n", "a has 'many' lookups"),
        ("f.json", f'{{"a": 1{"0" * 400}}}', "a has 1000"),
        ("f.json", '{"a": true}', "a has True lookups"),
        ("f.json", '{"a": 1, "a": 2}', "'a' is there twice in one object, as 1 and 2"),
        ("f.csv", "table,lookups\n", "must begin with the line name,pooling_factor"),
        ("f.csv", "name,pooling_factor\na\n", "line 2: has 1 cells"),
        ("f.csv", "name,pooling_factor\na,1\na,2\n", "a is there twice"),
        ("f.csv", "name,pooling_factor\na,-1\n", "a has -1 lookups"),
        ("f.csv", "name,pooling_factor\na,1_000\n", "a has '1_000' lookups"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words) as raised:
        pooling_factors(path, [])
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("number", ["1_000", "nan", "inf", "١"])
def test_what_only_python_takes_for_a_number_is_refused(number):
    with pytest.raises(InvalidInput, match=r"a has .* lookups"):
        pooling_factors(None, [f"a={number}"])


def test_an_option_that_is_no_pair_is_refused():
    with refused(UsageError, "NAME=LOOKUPS"):
        pooling_factors(None, ["3.0"])
