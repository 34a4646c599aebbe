"""Readers of labelled text: columns of tokens and tags (CoNLL), JSON of several kinds, and `datasets`."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minibert.errors import DataError
from minibert.text.labels import PADDING, PREFIXED, SCHEMES, UNTYPED, USUAL_OUTSIDE, LabelSet, Span, spans_from_tags
from minibert.train.annotations import EXPECTED, objects, text_and_spans

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("auto", "conll", "jsonl")
OVERLAPPING = ("error", "keep")
MAX_FAULTS = 20  # that are collected before reading stops
COMMENT = re.compile(r"#( newdoc| newpar| \S+ = ?)[^\t]*")  # CoNLL-U's; a token may be "#" too, with its tag behind it
INDEX = re.compile(r"\d+")
OTHER_INDEX = re.compile(r"\d+[-.]\d+")  # CoNLL-U's lines for two words written as one, and for words left out
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


class Faults:
    """What is wrong with some data: collected up to a limit, and raised all at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[str] = []

    def add(self, place: str, message: str) -> None:
        """Notes a fault; raises at the limit."""
        self.found.append(f"{place}: {message}")
        if len(self.found) == MAX_FAULTS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises DataError if there is a fault."""
        if len(self.found) == 1:
            raise DataError(f"{self.source}, {self.found[0]}")
        if self.found:
            more = f" (the first {MAX_FAULTS}; there may be more)" if len(self.found) == MAX_FAULTS else ""
            lines = "\n".join(f"  - {fault}" for fault in self.found)
            raise DataError(f"{self.source}: {len(self.found)} faults{more}:\n{lines}")


def read_examples(
    path: str | os.PathLike[str],
    format: str = "auto",
    scheme: str = "auto",
    *,
    token_column: int | None = None,
    tag_column: int | None = None,
    overlapping: str = "keep",
) -> list[Example]:
    """All examples of a file.

    Columns (`.txt`, `.conll`, `.bio`, ...): one token a line with its tag, parted by tabs or spaces, an empty line (or
    one of white space) between sentences; `-DOCSTART-` and CoNLL-U's comments are no tokens. The tag's column is found
    from what stands in it (the last one in which all are tags), the token's is the first other one that is no index.
    JSON, one object a line or all in one array: as for `annotations.text_and_spans`, or `tokens` with `tags` or
    `ner_tags`.

    Args:
        path: the file, in UTF-8.
        format: "conll" for columns, "jsonl" for JSON, "auto" to find out.
        scheme: of the tags, as for `text.labels.LabelSet`.
        token_column, tag_column: from 0; negative ones count from the end; default as above.
        overlapping: "error" to refuse entities that overlap, of which a tagger can learn one only.

    Raises:
        DataError: naming file, line and what was expected, of up to `MAX_FAULTS` faults.
    """
    path = Path(path)
    if format not in FORMATS:
        raise DataError(f"format: expected {', '.join(FORMATS)}, got {format!r}")
    faults = Faults(str(path))
    text = _decoded(path, faults)
    start = re.match(r"\s*(\{|\[\s*(\{|\]))", text)
    if format == "jsonl" or (format == "auto" and start):
        examples = _from_objects(objects(text), faults, str(path))
    else:
        examples = _from_columns(text, faults, scheme, token_column, tag_column)
    return _collected(examples, faults, overlapping)


def read_dataset(
    name: str, split: str, subset: str | None = None, scheme: str = "auto", *, overlapping: str = "keep"
) -> tuple[list[Example], list[str]]:
    """All examples of a split of a data set, and the tag names that it declares (none if it says nothing of them).

    Args:
        name: on the Hugging Face Hub, a directory of data files, or one written by `Dataset.save_to_disk`. Rows have
            `tokens` and `tags` or `ner_tags` (numbers of declared names, or names), or what JSON lines have.
        split: such as "train".
        subset: of the data set.
        scheme, overlapping: as in `read_examples`.

    Raises:
        DataError: naming the data set, the row and what was expected.
    """
    dataset = _load(name, split, subset)
    source = f"{name} {split}"
    declared: dict[str, list[str]] = {
        column: feature.feature.names
        for column, feature in dataset.features.items()
        if hasattr(getattr(feature, "feature", None), "names")
    }

    def rows() -> Iterator[tuple[int, Any]]:
        for number, row in enumerate(dataset):
            names = {column: [of[i] for i in row[column]] for column, of in declared.items() if row[column] is not None}
            yield number, {**row, **names}

    faults = Faults(source)
    examples = _from_objects(rows(), faults, source, unit="row", scheme=scheme)
    return _collected(examples, faults, overlapping), declared.get("ner_tags") or declared.get("tags") or []


def unknown_types(examples: Iterable[Example], known: Iterable[str]) -> dict[str, str]:
    """Each entity type that is not known, with the first place that has it."""
    known = set(known)
    unknown: dict[str, str] = {}
    for example in examples:
        for span in example.entities:
            if span.label not in known:
                unknown.setdefault(span.label, example.place)
    return unknown


def _load(name: str, split: str, subset: str | None) -> Dataset:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    try:
        if any((Path(name) / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            saved = load_from_disk(name)
            loaded = saved[split] if isinstance(saved, DatasetDict) else saved
        else:
            loaded = load_dataset(name, subset, split=split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{name}, split {split}: cannot be loaded by datasets ({message[0]})") from None
    if not isinstance(loaded, Dataset):
        raise DataError(f"{name}, split {split}: expected one data set, got {type(loaded).__name__}")
    return loaded


def _decoded(path: Path, faults: Faults) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: expected UTF-8, got UTF-16; save it as UTF-8")
    lines = []
    start = 0
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            faults.add(f"line {number}", f"not UTF-8 at byte {start + error.start:,} of the file")
        start += len(line) + 1
    faults.raise_if_any()  # what such lines hold cannot be told
    return "\n".join(lines)


def _collected(examples: Iterable[Example], faults: Faults, overlapping: str) -> list[Example]:
    if overlapping not in OVERLAPPING:
        raise DataError(f"overlapping: expected {', '.join(OVERLAPPING)}, got {overlapping!r}")
    found = list(_without_overlaps(examples, faults) if overlapping == "error" else examples)
    faults.raise_if_any()
    if not found:
        raise DataError(f"{faults.source}: holds no examples")
    return found


def _without_overlaps(examples: Iterable[Example], faults: Faults) -> Iterator[Example]:
    for example in examples:
        spans = sorted(example.entities, key=lambda span: (span.start, -span.end))
        for one, other in itertools.pairwise(spans):
            if other.start < one.end:
                place = example.place.removeprefix(f"{faults.source}, ")
                named = " and ".join(f"{span.label} {span.start}..{span.end}" for span in (one, other))
                faults.add(place, f"{named} overlap; expected one label for each character")
        yield example


# Columns.

Row = tuple[int, list[str]]  # its line, and what stands in its columns


def _from_columns(
    content: str, faults: Faults, scheme: str, token_column: int | None, tag_column: int | None
) -> Iterator[Example]:
    sentences = list(_sentences(content))
    if not sentences:
        return
    widths = Counter(len(fields) for rows, _ in sentences for _, fields in rows)
    width = max(widths, key=lambda number: (number > 1, widths[number]))
    rows = [fields for of, _ in sentences for _, fields in of if len(fields) == width]
    token, tag = _columns(rows, width, faults.source, token_column, tag_column) if width > 1 else (0, 0)
    tags = Counter(fields[tag].strip() for fields in rows)
    scheme, foreign = _scheme_of(tags, scheme)
    tokens = [fields[token] for fields in rows]
    indexed = all(INDEXED.fullmatch(one) for one in tokens)
    by_character = indexed or sum(len(one) == 1 for one in tokens) >= 0.99 * len(tokens)
    for of, given in sentences:
        whole = True
        for line, fields in of:
            message = _fault(fields, width, token, tag, foreign, scheme)
            if message:
                faults.add(f"line {line}", message)
                whole = False
        if whole:
            words = tuple(fields[token][0] if indexed else fields[token] for _, fields in of)
            names = tuple(fields[tag].strip() for _, fields in of)
            text, offsets = _join(words, given, by_character=by_character)
            entities = tuple(spans_from_tags(names, scheme))
            yield Example(text, entities, words, names, offsets, f"{faults.source}, line {of[0][0]}")


def _sentences(content: str) -> Iterator[tuple[list[Row], str | None]]:
    """The rows of each sentence, and its text if a comment gives it."""
    rows: list[Row] = []
    text: str | None = None
    for number, line in enumerate([*content.split("\n"), ""], 1):
        if COMMENT.fullmatch(line):
            text = line.removeprefix("# text = ") if line.startswith("# text = ") else text
        elif not line.strip():
            if rows:
                yield rows, text
                rows, text = [], None
        elif not line.startswith("-DOCSTART-"):
            fields = _fields(line)
            if len(fields) < 3 or not OTHER_INDEX.fullmatch(fields[0]):
                rows.append((number, fields))


def _fields(line: str) -> list[str]:
    if "\t" in line:
        return line.split("\t")
    head, _, tag = line.rpartition(" ")
    if head and not head.strip():  # the token is white space
        return [head, tag]
    return re.split(" +", line.strip(" "))


def _columns(
    rows: Sequence[Sequence[str]], width: int, source: str, token_column: int | None, tag_column: int | None
) -> tuple[int, int]:
    """The columns of tokens and of tags."""
    for name, column in (("token_column", token_column), ("tag_column", tag_column)):
        if column is not None and not -width <= column < width:
            raise DataError(f"{source}: {name} {column}: the file has {width} columns, 0 to {width - 1}")
    if tag_column is None:
        all_tags = [n for n in range(width) if all(_is_tag(row[n].strip()) for row in rows)]
        taken = None if token_column is None else token_column % width
        tag = max((n for n in all_tags if n != taken), default=width - 1 if taken != width - 1 else width - 2)
    else:
        tag = tag_column % width
    if token_column is None:
        is_index = width > 2 and tag != 0 and all(INDEX.fullmatch(row[0]) for row in rows)
        token = next(n for n in range(int(is_index), width) if n != tag)
    else:
        token = token_column % width
    if token == tag:
        raise DataError(f"{source}: token_column and tag_column: expected two columns, got {token} for both")
    return token, tag


def _is_tag(name: str) -> bool:
    return name == "O" or bool(PREFIXED.fullmatch(name) or UNTYPED.fullmatch(name))


def _scheme_of(tags: Counter[str], scheme: str) -> tuple[str, set[str]]:
    """The scheme of most tags, and those that are not of it."""
    try:
        return LabelSet(sorted(tags), scheme, complete=False).scheme, set()
    except DataError:
        candidates = [scheme] if scheme in SCHEMES else list(SCHEMES)
        foreign = {name: {tag for tag in tags if not _fits(tag, name)} for name in candidates}
        best = min(candidates, key=lambda name: sum(tags[tag] for tag in foreign[name]))
        if not foreign[best]:
            raise
        return best, foreign[best]


def _fits(tag: str, scheme: str) -> bool:
    match = PREFIXED.fullmatch(tag) or UNTYPED.fullmatch(tag)
    if match:
        return match[1] in SCHEMES[scheme]
    return tag.upper() in USUAL_OUTSIDE | PADDING


def _fault(fields: list[str], width: int, token: int, tag: int, foreign: set[str], scheme: str) -> str | None:
    shown = " ".join(fields)[:60]
    if len(fields) < 2 or width < 2:
        return f"expected a token and its tag, got {shown!r}"
    if len(fields) != width:
        return f"expected {width} columns, as in most lines, got {len(fields)}: {shown!r}"
    name = fields[tag].strip()
    if not fields[token] or not name:
        return f"expected a token and its tag, got {shown!r}"
    if name in foreign:
        return f"tag {name!r}: not of the scheme {scheme}, as most tags are"
    return None


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


# Objects.


def _from_objects(
    found: Iterable[tuple[int, Any]], faults: Faults, source: str, unit: str = "line", scheme: str = "auto"
) -> Iterator[Example]:
    for number, data in found:
        place = f"{unit} {number}"
        try:
            if isinstance(data, DataError):
                raise data
            if not isinstance(data, dict):
                raise DataError(f"expected a JSON object, got {type(data).__name__}")
            yield _example(data, f"{source}, {place}", scheme)
        except DataError as error:
            faults.add(place, str(error))
        except (KeyError, TypeError, AttributeError, ValueError):
            faults.add(place, f"{EXPECTED}, got {str(data)[:80]!r}")


def _example(data: dict[str, Any], place: str, scheme: str) -> Example:
    if "tokens" not in data:
        text, spans = text_and_spans(data)
        return Example(text, tuple(spans), None, None, (), place)
    words = tuple(str(token) for token in data["tokens"])
    tags = tuple(data["ner_tags"] if "ner_tags" in data else data["tags"])
    if len(words) != len(tags) or not all(isinstance(tag, str) for tag in tags):
        raise DataError(f"expected one tag, a string, for each of {len(words)} tokens, got {len(tags)}")
    if "" in words:
        raise DataError("tokens: expected no empty token")
    text, offsets = _join(words, None, by_character=all(len(word) == 1 for word in words))
    return Example(text, tuple(spans_from_tags(tags, scheme)), words, tags, offsets, place)
