"""A model against labelled text: scores by type, strict and lenient, what it confuses, and a page of its errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minibert.errors import DataError
from minibert.formats import Palette, cells, html_head, html_paragraph, html_tail
from minibert.predict import TokenClassifier
from minibert.text.decoding import Entity
from minibert.text.labels import LabelSet, Span, spans_from_tags, tags_from_spans
from minibert.train.data import Example, unknown_types
from minibert.train.metrics import span_scores
from minibert.writing import replacing

AT_A_TIME = 256  # examples between two steps of the progress bar


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. Spans are among the characters of each example's text."""

    scores: dict[str, dict[str, Any]]  # "strict" and "lenient", as `train.metrics.span_scores` gives them
    token_accuracy: float
    scheme: str
    confusions: list[tuple[str, str, int]]  # gold, predicted, how often; the most frequent first
    errors: list[tuple[Example, list[Span], list[Span]]]  # gold and predicted where they differ
    num_examples: int

    def to_json(self) -> str:
        """All figures as one JSON object."""
        confusions = [{"gold": gold, "predicted": got, "count": count} for gold, got, count in self.confusions]
        figures = {"scheme": self.scheme, "examples": self.num_examples, "token_accuracy": self.token_accuracy}
        return json.dumps({**figures, **self.scores, "confusions": confusions}, ensure_ascii=False)

    def rows(self) -> Iterator[tuple[str, dict[str, float], float]]:
        """Over all types and for each: its name, its strict scores, and its lenient F1."""
        strict, lenient = self.scores["strict"], self.scores["lenient"]
        for name in ("micro", "macro"):
            yield f"all ({name})", strict[name], lenient[name]["f1"]
        for label, scores in strict["types"].items():
            yield label, scores, lenient["types"][label]["f1"] if label in lenient["types"] else 0.0

    def lines(self) -> Iterator[str]:
        """A table for people."""
        rows = list(self.rows())
        width = max(cells(name) for name, _, _ in rows)
        yield f"{self.num_examples:,} examples, scheme {self.scheme}, token accuracy {self.token_accuracy:.4f}"
        yield f"{' ' * width}  {'precision':>9}  {'recall':>6}  {'F1':>6}  {'lenient F1':>10}  {'gold':>6}"
        for name, scores, lenient_f1 in rows:
            yield (
                f"{name}{' ' * (width - cells(name))}  {scores['precision']:9.4f}  {scores['recall']:6.4f}  "
                f"{scores['f1']:6.4f}  {lenient_f1:10.4f}  {scores['support']:6}"
            )
        yield "Precision, recall and F1 are strict: entities whose tags the scheme allows. Lenient reads any tags."
        if self.confusions:
            yield "Most frequent errors (gold -> predicted):"
            yield from (f"  {count:6}  {gold} -> {got}" for gold, got, count in self.confusions[:10])

    def write_page(self, path: Path, title: str) -> None:
        """An HTML page of the texts with errors: as they should be, and as they were predicted."""
        palette = Palette(label for label in self.scores["strict"]["types"])
        body = [html_head(title), f"<p>{len(self.errors):,} of {self.num_examples:,} texts with errors</p>"]
        for example, gold, got in self.errors:
            body.append(f"<h4>{html_paragraph(example.place, [], palette)}</h4>")
            for name, spans in (("gold", gold), ("predicted", got)):
                body.append(html_paragraph(example.text, _entities(example.text, spans), palette, f"({name})"))
        content = "\n".join([*body, html_tail(palette)]).encode("utf-8")
        with replacing(path.parent) as write:
            write(path.name, lambda place: place.write_bytes(content))


def evaluate(
    classifier: TokenClassifier, examples: Sequence[Example], progress: Callable[[int], Any] = lambda _: None
) -> Evaluation:
    """Predicts every example and compares.

    Where the data are words, each word gets one predicted tag; else each character. Nothing is cut, so a gold entity
    far inside a long text counts as any other.

    Raises:
        DataError: a gold type that is none of the model's labels, with the places.
    """
    labels = classifier.labels
    _refuse_unknown_types(examples, labels)
    strict: tuple[list[list[Span]], list[list[Span]]] = ([], [])
    lenient: tuple[list[list[Span]], list[list[Span]]] = ([], [])
    same = total = 0
    confusions: Counter[tuple[str, str]] = Counter()
    errors = []
    gold_scheme = _scheme(examples)
    for start in range(0, len(examples), AT_A_TIME):
        batch = examples[start : start + AT_A_TIME]
        for example, tags in zip(batch, _predict(classifier, batch), strict=True):
            ids = labels.encode(tags)
            gold = list(example.entities)
            got = labels.spans(ids, "lenient")
            gold_strict = gold if example.tags is None else spans_from_tags(example.tags, gold_scheme, "strict")
            strict[0].append(gold_strict)
            strict[1].append(labels.spans(ids, "strict"))
            lenient[0].append(gold)
            lenient[1].append(got)
            same += sum(a == b for a, b in zip(_tags(gold, len(tags), labels), tags, strict=True))
            total += len(tags)
            if set(gold) != set(got):
                confusions.update(_confusions(gold, got))
                errors.append((example, example.in_text(gold), example.in_text(got)))
        progress(len(batch))
    ranked = [(gold, got, count) for (gold, got), count in confusions.most_common()]
    scores = {"strict": span_scores(*strict), "lenient": span_scores(*lenient)}
    return Evaluation(scores, same / total if total else 0.0, labels.scheme, ranked, errors, len(examples))


def _predict(classifier: TokenClassifier, examples: Sequence[Example]) -> list[list[str]]:
    """One tag a word where there are words, else one a character."""
    results: list[list[str]] = [[] for _ in examples]
    is_by_word = [example.words is not None and not _is_characters(example) for example in examples]
    by_word = [n for n, words in enumerate(is_by_word) if words]
    for number, tags in zip(by_word, classifier.tag_words([examples[n].words or () for n in by_word]), strict=True):
        results[number] = tags
    others = [n for n, words in enumerate(is_by_word) if not words]
    for number, tags in zip(others, classifier.tag_characters([examples[n].text for n in others]), strict=True):
        example = examples[number]
        results[number] = tags if example.words is None else [tags[start] for start, _ in example.offsets]
    return results


def _is_characters(example: Example) -> bool:
    return example.words is not None and all(len(word) == 1 for word in example.words)


def _scheme(examples: Sequence[Example]) -> str:
    return LabelSet(sorted({tag for e in examples for tag in e.tags or ()} | {"O"}), complete=False).scheme


def _refuse_unknown_types(examples: Sequence[Example], labels: LabelSet) -> None:
    unknown = unknown_types(examples, labels.entity_types)
    if unknown:
        raise DataError(
            "; ".join(f"{place}: type {label!r}" for label, place in unknown.items())
            + f": the model knows {', '.join(labels.entity_types)}"
        )


def _tags(spans: list[Span], length: int, labels: LabelSet) -> list[str]:
    """Gold tags in the model's own scheme."""
    return tags_from_spans(_flat(spans), length, labels.scheme, labels.outside or "O")


def _flat(spans: list[Span]) -> list[Span]:
    """Of nested entities the first and longest, in order: what tags and marks can show."""
    flat: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if not flat or span.start >= flat[-1].end:
            flat.append(span)
    return flat


def _confusions(gold: list[Span], got: list[Span]) -> Iterator[tuple[str, str]]:
    """What became of each gold entity that was not found, and where each entity that is none came from."""
    for span in set(gold) - set(got):
        over = [other for other in got if other.start < span.end and span.start < other.end]
        if not over:
            yield span.label, "nothing"
        for other in over:
            edges = "" if (other.start, other.end) == (span.start, span.end) else " (other edges)"
            yield span.label, f"{other.label}{edges}"
    for span in set(got) - set(gold):
        if not any(other.start < span.end and span.start < other.end for other in gold):
            yield "nothing", span.label


def _entities(text: str, spans: list[Span]) -> list[Entity]:
    return [Entity(label, start, end, text[start:end], 1.0) for label, start, end in _flat(spans)]
