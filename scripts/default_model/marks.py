"""Sentences marked by hand: [TYPE text] around each entity."""

import re
from pathlib import Path

from default_model.generate import Text
from minibert.text.labels import Span

MARK = re.compile(r"\[([A-Z]+) ([^\[\]]+)\]")


def read_marked(path: Path) -> list[Text]:
    """The sentences of a file, one a line; those that begin with # are comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [parse(line) for line in lines if line.strip() and not line.startswith("#")]


def parse(line: str) -> Text:
    """`[NAME 王小明]住在[LOC 北京]。` as text and spans."""
    result, last = Text("", ()), 0
    for mark in MARK.finditer(line):
        result += Text(line[last : mark.start()], ())
        result += Text(mark[2], (Span(mark[1], 0, len(mark[2])),))
        last = mark.end()
    return result + Text(line[last:], ())
