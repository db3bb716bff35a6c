"""Foreign text made safe to show: on a terminal, in a log, in an event, on a page.

What others wrote (a device's name, a note in a plan, an answer of a server, a URL that a user typed) passes here before it leaves
the program. `NeuroshardError`, `wrapped`, `log`, the command line's `say` and the report's page call it, so a room need not.
"""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

# Characters that a terminal or a reader does not show, but acts on: control characters (ESC, C1), characters of no width, those
# that turn the direction of text, halves of surrogate pairs, tags.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"  # shown as one space

_USER_INFO = re.compile(
    r"""(//|:/)(?:[^\s/?\#@'"<>\\]*          # //user:password@, and :/user:password@ of a URL that was taken for a path
         |[^\s/?\#@:'"<>\\]*:(?!\d+[/?\#])[^\s@'"<>\\]*)@""",  # //user:pass/word@, which no URL should hold
    re.X,
)
# user:password@host
_BARE_USER_INFO = re.compile(r"(?<![\w/])([A-Za-z0-9._%+-]+):[^\s/:@'\"<>\\]+@(?!sha256:)(?=[\w\[])")
_SECRET_PARAMETER = re.compile(
    r"""([?&;](?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|signature|sig|awsaccesskeyid
         |(?:access_|id_|refresh_|auth_|session_)?token|api_?key|key|password|passwd|pwd|secret|client_secret|auth|credentials?)=)
        [^\s&;\#'"<>\\]+""",
    re.X | re.I,
)
_AUTHORIZATION = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",]+", re.I)

_silent: ContextVar[bool] = ContextVar("silent", default=False)
_in_words: ContextVar[Callable[[str], str] | None] = ContextVar("in_words", default=None)


def clean(text: object) -> str:
    """One line of foreign text: line breaks and tabs are spaces, hidden characters are shown as `\\u001b`, secrets are `***`.

    Secrets are the user info of URLs (`http://***@host`), tokens and signatures in their queries, and Authorization headers.
    """
    return _HIDDEN.sub(_shown, without_secrets(str(text)))


def clean_lines(text: str) -> str:
    """Lines of text, each as `clean` makes it. JSON stays JSON."""
    return "\n".join(map(clean, text.split("\n")))


def without_secrets(text: str) -> str:
    """The text with `***` for the secrets of its URLs and headers."""
    if "@" in text:
        text = _BARE_USER_INFO.sub("***@", _USER_INFO.sub(r"\1***@", text))
    if "=" in text:
        text = _SECRET_PARAMETER.sub(r"\1***", text)
    return _AUTHORIZATION.sub(r"\1***", text)


def cleaned(value: Any) -> Any:
    """A value of lists, tuples and mappings, with all its strings cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cleaned, value))
    if isinstance(value, list | tuple):
        return type(value)(map(cleaned, value))
    return value


def accept_all_characters() -> None:
    """From now on stdout and stderr show ? for a character that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def silent(yes: bool = True) -> Iterator[None]:
    """Inside, no progress is shown and `log` prints nothing. Inside a silent block, `silent(False)` changes nothing."""
    before = _silent.set(yes or _silent.get())
    try:
        yield
    finally:
        _silent.reset(before)


def is_silent() -> bool:
    return _silent.get()


@contextmanager
def in_words(words: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """Inside, `log` prints what `words` makes of a line: the command line and Python name an option differently. Inside another
    such block nothing changes. Yields the function that is in force."""
    outer = _in_words.get()
    before = _in_words.set(outer or words)
    try:
        yield outer or words
    finally:
        _in_words.reset(before)


def log(*lines: object) -> None:
    """Print lines to stderr, each cleaned, unless silent."""
    if lines and not is_silent():
        words = _in_words.get() or str
        print(*(clean(words(str(line))) for line in lines), sep="\n", file=sys.stderr, flush=True)


class CleanedStream(io.TextIOBase):
    """A stream for what another library prints: each line is cleaned, then goes to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.stream.write(clean_lines(text))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    if character in _BLANKS:
        return " "
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(rf"\u{units[i : i + 4]}" for i in range(0, len(units), 4))
