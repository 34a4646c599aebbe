"""Readers of labelled text: columns of tokens and tags (CoNLL), and JSON lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minibert.errors import DataError
from minibert.text.labels import Span, spans_from_tags

FORMATS = ("auto", "conll", "jsonl")
COMMENT = re.compile(r"#( newdoc| newpar| \S+ = ?)[^\t]*")  # CoNLL-U's; a token may be "#" too, with its tag behind it
INDEXED = re.compile(r"(.).?\d+", re.DOTALL)  # a character and its place in its word, as Weibo NER has them
CJK = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f]")


@dataclass(frozen=True)
class Example:
    """A labelled text.

    words and tags are None where the file gives places among the characters (JSON lines); entities are among the
    words where there are words, else among the characters. offsets say where each word stands in the text.
    """

    text: str
    entities: tuple[Span, ...]
    words: tuple[str, ...] | None
    tags: tuple[str, ...] | None
    offsets: tuple[tuple[int, int], ...]
    place: str  # file and line

    def in_text(self, spans: Iterable[Span]) -> list[Span]:
        """Entities such as this example's own, among the characters of the text."""
        if self.words is None:
            return list(spans)
        return [Span(label, self.offsets[start][0], self.offsets[end - 1][1]) for label, start, end in spans]


def read_examples(path: str | os.PathLike[str], format: str = "auto", scheme: str = "auto") -> list[Example]:
    """All examples of a file.

    Columns (`.txt`, `.conll`, `.bio`, ...): a token and its tag a line, by tab or spaces, an empty line (or one of
    white space) between sentences; or CoNLL-U's `index, token, tag` with its comments. JSON lines: `text` with
    `entities` or `spans` (each `label`, `start`, `end`), with `label` as CLUENER has it (ends inclusive), or
    `tokens` with `tags` or `ner_tags`.

    Raises:
        DataError: naming the file and line, and what was expected.
    """
    path = Path(path)
    if format not in FORMATS:
        raise DataError(f"format: expected {', '.join(FORMATS)}, got {format!r}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 at byte {error.start:,} of the file") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    as_json = format == "jsonl" or (format == "auto" and text.lstrip()[:1] == "{")
    found = list(_from_json(path, lines) if as_json else _from_columns(path, lines, scheme))
    if not found:
        raise DataError(f"{path}: holds no examples")
    return found


# Columns.


def _from_columns(path: Path, lines: list[str], scheme: str) -> Iterator[Example]:
    sentences: list[tuple[int, list[tuple[str, str]], str | None]] = []
    rows: list[tuple[str, str]] = []
    text: str | None = None
    for number, line in enumerate([*lines, ""], 1):
        if COMMENT.fullmatch(line):
            text = line.removeprefix("# text = ") if line.startswith("# text = ") else text
        elif line.strip():
            rows.append(_row(path, number, line))
        elif rows:
            sentences.append((number - len(rows), rows, text))
            rows, text = [], None
    tokens = [token for _, of, _ in sentences for token, _ in of]
    if tokens and all(INDEXED.fullmatch(token) for token in tokens):
        sentences = [(line, [(token[0], tag) for token, tag in of], text) for line, of, text in sentences]
        tokens = [token[0] for token in tokens]
    by_character = sum(len(token) == 1 for token in tokens) >= 0.99 * len(tokens)
    for first, of, given in sentences:
        words, tags = tuple(token for token, _ in of), tuple(tag for _, tag in of)
        place = f"{path}, line {first}"
        joined, offsets = _join(words, given, by_character=by_character)
        try:
            entities = tuple(spans_from_tags(tags, scheme))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        yield Example(joined, entities, words, tags, offsets, place)


def _row(path: Path, number: int, line: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) >= 3 and columns[0].isdecimal():
        return columns[1], columns[2].strip()
    if len(columns) == 1:
        columns = line.rsplit(" ", 1)
    if len(columns) < 2 or not columns[0] or not columns[-1].strip():
        raise DataError(f"{path}, line {number}: expected a token and its tag, got {line[:60]!r}")
    return columns[0], columns[-1].strip()


def _join(words: tuple[str, ...], given: str | None, *, by_character: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The sentence that words make: the one given if it is made of them, else joined as their scripts are written."""
    if given is not None:
        offsets = _found_in(given, words)
        if offsets is not None:
            return given, offsets
    text = ""
    places = []
    for word in words:
        if text and not by_character and not (CJK.match(text[-1]) or CJK.match(word[0])):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
    return text, tuple(places)


def _found_in(text: str, words: tuple[str, ...]) -> tuple[tuple[int, int], ...] | None:
    places = []
    end = 0
    for word in words:
        start = text.find(word, end)
        if start < 0 or text[end:start].strip():
            return None
        end = start + len(word)
        places.append((start, end))
    return None if text[end:].strip() else tuple(places)


# JSON lines.


def _from_json(path: Path, lines: list[str]) -> Iterator[Example]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON ({error})") from None
        if not isinstance(data, dict):
            raise DataError(f"{place}: expected a JSON object, got {type(data).__name__}")
        try:
            yield _example(data, place)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, DataError):
                raise DataError(f"{place}: {error}") from None
            raise DataError(
                f"{place}: expected text with entities (label, start, end), or tokens with tags, got {line[:80]!r}"
            ) from None


def _example(data: dict[str, Any], place: str) -> Example:
    if "tokens" in data:
        words = tuple(str(token) for token in data["tokens"])
        tags = tuple(data["ner_tags"] if "ner_tags" in data else data["tags"])
        if len(words) != len(tags) or not all(isinstance(tag, str) for tag in tags):
            raise DataError(f"expected one tag, a string, for each of {len(words)} tokens, got {len(tags)}")
        text, offsets = _join(words, None, by_character=all(len(word) == 1 for word in words))
        return Example(text, tuple(spans_from_tags(tags)), words, tags, offsets, place)
    text = data["text"]
    if not isinstance(text, str):
        raise DataError(f"text: expected a string, got {text!r}")
    if isinstance(data.get("label"), dict):  # CLUENER: {type: {surface: [[first, last], ...]}}
        spans = [
            Span(label, start, end + 1)
            for label, surfaces in data["label"].items()
            for places in surfaces.values()
            for start, end in places
        ]
    else:
        entities = data["entities"] if "entities" in data else data["spans"]
        spans = [Span(str(entity["label"]), entity["start"], entity["end"]) for entity in entities]
    for span in spans:
        if type(span.start) is not int or type(span.end) is not int or not 0 <= span.start < span.end <= len(text):
            raise DataError(f"entity {span.label} {span.start}..{span.end}: not within the {len(text)} characters")
    return Example(text, tuple(sorted(spans, key=lambda s: (s.start, s.end))), None, None, (), place)
