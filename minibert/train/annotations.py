"""Labelled texts as JSON objects: what annotation tools export, and what published data sets hold.

doccano: https://github.com/doccano/doccano; Label Studio: https://labelstud.io/guide/task_format; CLUENER2020:
https://github.com/CLUEbenchmark/CLUENER2020.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from minibert.errors import DataError
from minibert.text.labels import Span

EXPECTED = "expected text with entities (label, start, end), tokens with tags, or what Label Studio or doccano export"
BETWEEN = re.compile(r"[,\s]*")  # two objects of an array
NOT_ENTITIES = {"relation", "choices", "textarea", "rating", "taxonomy"}  # what Label Studio keeps beside entities


def text_and_spans(data: dict[str, Any]) -> tuple[str, list[Span]]:
    """A text and the entities among its characters, in order, each once.

    `text` with `entities` or `spans` (each `label`, `start`, `end`; or doccano's `start_offset`, `end_offset`), with
    doccano's `label` or `labels` ([start, end, label]), or with CLUENER's `label` ({type: {surface: [[first, last]]}},
    ends inclusive); or a task of Label Studio, whole (`data` with `annotations`) or in its short form.

    Raises:
        DataError: anything else, or an entity that does not lie within the text or reads differently there.
    """
    if isinstance(data.get("data"), dict):
        return _label_studio(data)
    text = data.get("text")
    if text is None:
        raise DataError(EXPECTED)
    if not isinstance(text, str):
        raise DataError(f"text: expected a string, got {text!r}")
    for name in ("entities", "spans", "label", "labels"):
        given = data.get(name)
        if isinstance(given, list):
            return text, _in_order(_span(text, entry) for entry in given)
        if isinstance(given, dict):
            return text, _in_order(_cluener(text, given))
    raise DataError(EXPECTED)


def objects(content: str) -> Iterator[tuple[int, Any]]:
    """The objects of JSON lines, or of one JSON array, each with its line.

    What cannot be read comes as the error.
    """
    if content.lstrip()[:1] != "[":
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, DataError(f"not JSON ({error})")
        return
    decoder = json.JSONDecoder()
    place, number, counted = content.index("[") + 1, 1, 0
    while True:
        place += len(BETWEEN.match(content, place)[0])  # type: ignore[index]  # it matches nothing, too
        number, counted = number + content.count("\n", counted, place), place
        if content.startswith("]", place) and not content[place + 1 :].strip():
            return
        try:
            data, place = decoder.raw_decode(content, place)
        except (ValueError, RecursionError) as error:
            yield number, DataError(f"not JSON ({error})")
            return
        yield number, data


def _in_order(spans: Iterator[Span]) -> list[Span]:
    return sorted(dict.fromkeys(spans), key=lambda span: (span.start, span.end))


def _cluener(text: str, types: dict[str, Any]) -> Iterator[Span]:
    for label, surfaces in types.items():
        for surface, places in surfaces.items():
            for start, last in places:
                yield _checked(text, label, start, last + 1, surface)


def _span(text: str, entry: Any) -> Span:
    if isinstance(entry, list | tuple):
        start, end, label = entry
        return _checked(text, label, start, end, None)
    start = entry["start"] if "start" in entry else entry["start_offset"]
    end = entry["end"] if "end" in entry else entry["end_offset"]
    return _checked(text, _one_label(entry), start, end, entry.get("text"))


def _one_label(entry: dict[str, Any]) -> Any:
    labels = [entry["label"]] if "label" in entry else entry["labels"]
    if len(labels) != 1:
        raise DataError(f"expected one label for each entity, got {labels!r}")
    return labels[0]


def _checked(text: str, label: Any, start: Any, end: Any, surface: Any) -> Span:
    if not isinstance(label, str) or not label.strip():
        raise DataError(f"label: expected a name, got {label!r}")
    label = label.strip()
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text.encode("utf-16-le")) // 2:
        raise _outside(text, label, start, end)
    if isinstance(surface, str) and not _reads(text[start:end], surface):
        # Browsers count in UTF-16 units, and so has Label Studio: https://github.com/HumanSignal/label-studio/issues/1347
        units = text.encode("utf-16-le")
        before, inside = (units[2 * a : 2 * b].decode("utf-16-le", "replace") for a, b in ((0, start), (start, end)))
        if not _reads(inside, surface):
            raise DataError(
                f"entity {label} {start}..{end}: expected {surface!r}, the text has {text[start:end]!r} there"
            )
        start, end = len(before), len(before) + len(inside)
    if end > len(text):
        raise _outside(text, label, start, end)
    return Span(label, start, end)


def _reads(piece: str, surface: str) -> bool:
    return surface in (piece, piece.replace("\n", "\\n"))  # as Label Studio writes a line's end


def _outside(text: str, label: str, start: Any, end: Any) -> DataError:
    return DataError(f"entity {label} {start}..{end}: not within the {len(text)} characters")


def _label_studio(task: dict[str, Any]) -> tuple[str, list[Span]]:
    fields = {name: value for name, value in task["data"].items() if isinstance(value, str)}
    results = _one_annotation(task)
    names = [name for name in ("text", *fields) if name in fields]
    if "text" not in fields and len(fields) != 1:
        raise DataError(f"data: expected text, got {', '.join(task['data']) or 'nothing'}")
    text = fields[names[0]]
    entities = [result for result in results if result.get("type") not in NOT_ENTITIES]
    return text, _in_order(_span(text, result["value"]) for result in entities)


def _one_annotation(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the one annotation that is not cancelled, or of the one that is the ground truth."""
    given = task["annotations"] if "annotations" in task else task.get("completions", [])
    done = [annotation for annotation in given if not annotation.get("was_cancelled")]
    chosen = [annotation for annotation in done if annotation.get("ground_truth")] or done
    if len(chosen) != 1:
        raise DataError(
            f"task {task.get('id', '?')}: expected one annotation, got {len(chosen)}; label it, leave it out of the "
            "export, or mark one as ground truth"
        )
    results: list[dict[str, Any]] = chosen[0]["result"]
    return results
