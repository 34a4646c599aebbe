"""How well predicted tags match gold ones: entities found and right, by type and in all; equal to seqeval's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from minibert.errors import DataError
from minibert.text.labels import LabelSet, Span


def entity_scores(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    scheme: str = "auto",
    mode: str = "strict",
) -> dict[str, Any]:
    """Precision, recall and F1 of entities, which are right if type, start and end are.

    Args:
        gold, predicted: one list of tags a sentence, of equal lengths.
        scheme: as for `text.labels.LabelSet`; "auto" finds it from all tags of both.
        mode: "strict" counts entities that the scheme allows; "lenient" reads whatever stands there, as the decoder
            does (see `text.labels`). The same for gold and predicted.

    Returns:
        micro, macro and weighted: each with precision, recall, f1 and support (gold entities); types: the same for
        each type of gold or predicted entity; token_accuracy; scheme and mode. A ratio of nothing is 0.0.

    Raises:
        DataError: lists of different lengths, or tags that belong to no one scheme.
    """
    if len(gold) != len(predicted):
        raise DataError(f"expected as many predicted sentences as gold ones, {len(gold)}, got {len(predicted)}")
    for number, (one, other) in enumerate(zip(gold, predicted, strict=True)):
        if len(one) != len(other):
            raise DataError(f"sentence {number}: {len(one)} gold tags, {len(other)} predicted")
    names = dict.fromkeys(tag for sentences in (gold, predicted) for tags in sentences for tag in tags)
    labels = LabelSet(list(names), scheme, complete=False)
    read = [[labels.spans(labels.encode(tags), mode) for tags in sentences] for sentences in (gold, predicted)]
    same = sum(a == b for one, other in zip(gold, predicted, strict=True) for a, b in zip(one, other, strict=True))
    total = sum(map(len, gold))
    scores = span_scores(*read)
    return {**scores, "token_accuracy": same / total if total else 0.0, "scheme": labels.scheme, "mode": mode}


def span_scores(gold: Iterable[Iterable[Span]], predicted: Iterable[Iterable[Span]]) -> dict[str, Any]:
    """The same from entities, one list a sentence: micro, macro, weighted and types."""
    right, found, wanted = Counter[str](), Counter[str](), Counter[str]()
    for one, other in zip(gold, predicted, strict=True):
        expected, got = set(one), set(other)
        wanted.update(span.label for span in expected)
        found.update(span.label for span in got)
        right.update(span.label for span in expected & got)
    types = {label: _scores(right[label], found[label], wanted[label]) for label in sorted(wanted | found)}
    support = wanted.total()
    averaged: dict[str, dict[str, float]] = {}
    for name, weights in (
        ("macro", dict.fromkeys(types, 1)),
        ("weighted", {label: scores["support"] for label, scores in types.items()}),
    ):
        weight = sum(weights.values())
        averaged[name] = {
            key: sum(weights[label] * scores[key] for label, scores in types.items()) / weight if weight else 0.0
            for key in ("precision", "recall", "f1")
        } | {"support": support}
    return {"micro": _scores(right.total(), found.total(), support), **averaged, "types": types}


def _scores(right: int, found: int, wanted: int) -> dict[str, float]:
    precision = right / found if found else 0.0
    recall = right / wanted if wanted else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1, "support": wanted}
