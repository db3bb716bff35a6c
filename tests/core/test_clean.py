"""What is shown of text that others wrote: no hidden character, no secret; and everything else as it was."""

import io
import json

import pytest

from neuroshard.core.clean import CleanedStream, clean, clean_lines, cleaned
from neuroshard.core.errors import StoreError
from neuroshard.core.text import wrapped

HIDDEN = "\x1b\x07\x00\x7f\x9b\x9d\u061c\u200b\u200d\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff\U000e0041\ud800"


def test_hidden_characters_are_shown_by_their_numbers():
    shown = clean(f"a{HIDDEN}b")

    assert not set(HIDDEN) & set(shown)
    assert shown.startswith(r"a\u001b\u0007")
    assert shown.endswith(r"\udb40\udc41\ud800b")


@pytest.mark.parametrize("breaking", ["\n", "\r", "\t", "\x0b", "\x85", "\u2028"])
def test_foreign_text_has_one_line(breaking):
    assert clean(f"a{breaking}b") == "a b"
    assert wrapped(f"a{breaking}b") == ["a b"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://admin:s3cretpw@host:8888/x: closed", "http://***@host:8888/x: closed"),
        ("http://:s3cretpw@host", "http://***@host"),
        ("https://s3cretpw@host/a@b", "https://***@host/a@b"),
        ("http://admin:s3/cretpw@host", "http://***@host"),
        ("redis://u:s3cretpw@h and s3://u:s3cretpw@b/k", "redis://***@h and s3://***@b/k"),
        ("admin:s3cretpw@host:8888: no", "***@host:8888: no"),
        ("http://h/k?X-Amz-Signature=s3cretpw&a=1", "http://h/k?X-Amz-Signature=***&a=1"),
        ("http://h/k?a=1&x-amz-security-token=s3cretpw#x", "http://h/k?a=1&x-amz-security-token=***#x"),
        ("http://h/?token=s3cretpw", "http://h/?token=***"),
        ("Authorization: Bearer s3cretpw", "Authorization: Bearer ***"),
        ('{"url": "http://u:s3cretpw@h", "a": 1}', '{"url": "http://***@h", "a": 1}'),
    ],
)
def test_secrets_of_urls_are_stars(text, shown):
    assert clean(text) == shown
    assert clean(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/prefix/a@b/live.json",
        "http://host:8888/path@x",
        "file:///home/me@work/x",
        "me@example.com",
        "ghcr.io/x/y:1.0@sha256:abc",
        "table 'user_id' → 2 × 4 columns, █▓░ ½ 東京 é",
        "seed=3, keys=4",
    ],
)
def test_what_is_neither_is_left_as_it_is(text):
    assert clean(text) == text


def test_json_stays_json():
    data = {"note": f"a{HIDDEN[:-2]}", "url": "http://u:s3cretpw@h/?token=s3cretpw", "n": [1, None]}
    text = clean_lines(json.dumps(data, indent=2, ensure_ascii=False))

    assert json.loads(text) == {**data, "url": "http://***@h/?token=***"}
    assert not set(HIDDEN) & set(text)


def test_values_are_cleaned_all_through():
    assert cleaned({"a\x1b": ["b\x1b", ("c\x1b", 1.5)]}) == {r"a\u001b": [r"b\u001b", (r"c\u001b", 1.5)]}


def test_an_error_is_clean_wherever_it_becomes_text():
    error = StoreError("http://u:s3cretpw@h/\x1b]0;x\x07\nerror: forged")

    assert str(error) == f"{error}" == r"http://***@h/\u001b]0;x\u0007 error: forged"


def test_what_another_library_prints_is_cleaned():
    stream = io.StringIO()
    print("look at http://u:s3cretpw@h\x1b", "next", sep="\n", file=CleanedStream(stream))

    assert stream.getvalue() == "look at http://***@h\\u001b\nnext\n"
