"""`minibert predict`: texts from arguments, files and standard input, to lines of one of the output formats."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minibert.errors import DataError
from minibert.formats import (
    Palette,
    conll_lines,
    html_head,
    html_paragraph,
    html_tail,
    json_line,
    terminal_lines,
)
from minibert.predict import TokenClassifier
from minibert.text.decoding import Entity


@dataclass(frozen=True)
class Line:
    """One text to be tagged."""

    text: str
    source: str = ""  # file
    number: int = 0  # line
    size: int = 0  # bytes read for it
    invalid: int | None = None  # where in the line, in bytes, it stops being UTF-8


def read_lines(file: BinaryIO, name: str, report: Callable[[str], None], *, whole: bool = False) -> Iterator[Line]:
    """The lines of a file, line breaks left off, or with `whole` the file as one text, just as it is.

    Bytes that are no UTF-8 are reported with their place, and stand as U+FFFD in the line, which is marked.
    """
    offset = 0
    for number, raw in enumerate([file.read()] if whole else file, 1):
        content = raw if whole else raw.removesuffix(b"\n").removesuffix(b"\r")
        invalid = None
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            invalid = error.start
            report(f"{name}, line {number}: not UTF-8 at byte {invalid} of the line, {offset + invalid:,} of the file")
            text = content.decode("utf-8", errors="replace")
        yield Line(text.removeprefix("\ufeff") if number == 1 and not whole else text, name, number, len(raw), invalid)
        offset += len(raw)


def read_files(paths: Sequence[Path], report: Callable[[str], None], *, whole: bool) -> Iterator[Line]:
    """The lines of several files.

    Raises:
        DataError: a file cannot be read.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                yield from read_lines(file, str(path), report, whole=whole)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def tagged(classifier: TokenClassifier, lines: Iterable[Line], *, at_once: bool) -> Iterator[tuple[Line, list[Entity]]]:
    """Each line with its entities, in order; with `at_once` nothing is read ahead, as for somebody who types."""
    if at_once:
        yield from ((line, classifier(line.text)) for line in lines)
        return
    waiting: deque[Line] = deque()

    def texts() -> Iterator[str]:
        for line in lines:
            waiting.append(line)
            yield line.text

    for entities in classifier.stream(texts()):
        yield waiting.popleft(), entities


def rendered(
    results: Iterable[tuple[Line, list[Entity]]], format: str, scheme: str, *, colour: bool = False
) -> Iterator[tuple[Line | None, str]]:
    """What to write for each line, whole lines at a time; a page's head and tail belong to none."""
    palette = Palette()
    if format == "html":
        yield None, html_head("Entities")
    for line, entities in results:
        place = {"file": line.source, "line": line.number} if line.source else {}
        marked = {} if line.invalid is None else {"invalid_utf8_at": line.invalid}
        note = "" if line.invalid is None else f"not UTF-8 at byte {line.invalid} of the line"
        if format == "jsonl":
            output = json_line(line.text, entities, **place, **marked)
        elif format == "conll":
            head = [f"# {note}"] if note else []
            output = "\n".join([*head, *conll_lines(line.text, entities, scheme), ""])
        elif format == "html":
            output = html_paragraph(line.text, entities, palette, note, scores=True)
        else:
            rows = terminal_lines(line.text, entities, palette, colour=colour)
            output = "\n".join([*rows, *([f"  ({note})"] if note else [])])
        yield line, output + "\n"
    if format == "html":
        yield None, html_tail(palette) + "\n"


def write_whole_lines(text: str) -> None:
    """Gives whole lines to standard output in one piece, so that an interrupted run leaves no half of one."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
