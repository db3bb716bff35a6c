"""Finds the lines of TorchRec's planner in a log.

A line is `# text #`, whatever stands around it: a logger's prefix, colours, JSON of a collector, more such lines, and a line
break where a collector or a terminal cut it.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from neuroshard.files.disk import read_bytes

FRAME = "#"  # the text of the row of # above and below a printout
_TITLE = "--- Planner Statistics ---"
_FRAME = re.compile(r"(#{20,})")
_RECORD = re.compile(r"#( .*? )#")
_UNCLOSED = re.compile(r"# [^#]*$")
# ESC as it is, as JSON, Python and rsyslog (#033) escape it, and as editors show it
_COLOUR = re.compile(r"(?:\x1b|\\u001[bB]|\\x1b|\\033|#033|\^\[)\[[0-9;?]*[A-Za-z]")
_PART = re.compile(r"^\S+ (?:stdout|stderr) [PF] ")  # what a container's runtime writes before each part of a line
# torchrun's [rank0]: or [default0]:, mpirun's [1,0]<stderr>:, srun's 0:
_WRITER = re.compile(r"\s*(\[[^\]\s]*\d\](?:<\w+>)?:?|\d+:)")


class LogLine(NamedTuple):
    """A line of a printout, its place, and the mark of the process that wrote it, if there is one."""

    number: int
    writer: str
    text: str


class Printout(NamedTuple):
    """The lines of a log from the title of its last printout on, and where all its printouts begin."""

    path: Path
    lines: Sequence[LogLine]
    starts: Sequence[int]

    def where(self, line: LogLine) -> str:
        return f"{self.path}: line {line.number}"

    @property
    def place(self) -> str:
        """Where the printout begins: the file if it has no title."""
        return f"{self.path}: the printout of line {self.starts[-1]}" if self.starts else str(self.path)


def last_printout(path: Path) -> Printout:
    """The last printout of a log; where processes that mark their lines wrote at once, that of one of them. May be empty."""
    lines = list(_lines(path))
    titles = [line for line in lines if _TITLE in line.text]
    # each process marks its lines, so its printout can be taken out of those of others
    if len(writers := {line.writer for line in titles}) > 1 and {line.writer for line in lines} == writers:
        lines = [line for line in lines if line.writer == titles[-1].writer]
    last = max((index for index, line in enumerate(lines) if _TITLE in line.text), default=0)
    return Printout(path, lines[last:], [line.number for line in titles])


def _lines(path: Path) -> Iterator[LogLine]:
    framed, begun, writer = False, "", ""  # begun: a line that has no end yet; only printouts hold such lines
    at = 0
    for number, raw in enumerate(read_bytes(path).decode("utf-8", errors="replace").splitlines(), 1):
        line = _COLOUR.sub("", raw)
        if begun and not _opens(line):
            line = begun + _PART.sub("", line)
        else:
            if (
                begun.count("  ") > 2
            ):  # a row that was cut short: whoever reads its cells says so; else a # of another line
                yield LogLine(at, writer, begun[1:].strip())
            mark = _WRITER.match(line)
            at, writer = number, mark.group(1) if mark else ""
        begun = ""
        pieces = _FRAME.split(line)
        for index, piece in enumerate(pieces):
            if index % 2:
                framed = True
                yield LogLine(at, writer, FRAME)
                continue
            # without a prefix the # of a line beside a frame is one of the frame's
            text = "#" + piece if index and piece.startswith("  ") else piece
            text = text + "#" if index + 1 < len(pieces) and text.endswith(" ") and _UNCLOSED.search(text) else text
            end = 0
            for found in _RECORD.finditer(text):
                yield LogLine(at, writer, found.group(1).strip())
                end = found.end()
            unclosed = _UNCLOSED.search(text, end)
            begun = unclosed.group() if framed and unclosed else ""
    if begun:
        yield LogLine(at, writer, begun[1:].strip())


def _opens(line: str) -> bool:
    """Whether the first # of a line begins one of the planner's lines; otherwise it ends the one before, or there is none."""
    first = line.find("#")
    return first >= 0 and (line.startswith("# ", first) or _FRAME.match(line, first) is not None)
