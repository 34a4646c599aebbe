"""From probabilities to entities: the strategies, the scores, and the likeliest legal sequence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minibert.text.alignment import Tokens
from minibert.text.decoding import (
    PathScores,
    best_paths,
    entities_of,
    entries_of,
    marginals,
    most_likely,
    scheme_scores,
    word_probabilities,
)
from minibert.text.labels import SCHEMES, LabelSet
from text.test_labels import names_of


def tokens_of(words: list[int]) -> Tokens:
    """Tokens of one character each, in these words."""
    places = np.arange(len(words))
    return Tokens(places, places, places + 1, np.array(words))


AB = LabelSet(["O", "I-A", "I-B"], "IO")
PIECES = np.array([[0.0, 0.6, 0.4], [0.0, 0.1, 0.9]], dtype=np.float32)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("first", [0.0, 0.6, 0.4]), ("max", [0.0, 0.1, 0.9]), ("average", [0.0, 0.35, 0.65])],
)
def test_pieces_of_one_word_that_disagree(strategy: str, expected: list[float]) -> None:  # D08
    tokens = tokens_of([0, 0])
    word = word_probabilities(PIECES, tokens, strategy)
    assert word == pytest.approx(np.array([expected]))
    (entity,) = entities_of("ab", tokens, most_likely(word), word, AB, by_word=True)
    label, score = ("A", 0.6) if strategy == "first" else ("B", max(expected))
    assert (entity.label, entity.start, entity.end, entity.text) == (label, 0, 2, "ab")
    assert entity.score == pytest.approx(score)


def test_tokens_by_themselves_that_disagree() -> None:
    tokens = tokens_of([0, 0])
    simple = entities_of("ab", tokens, most_likely(PIECES), PIECES, AB, by_word=False)
    assert [(e.label, e.start, e.end) for e in simple] == [("A", 0, 1), ("B", 1, 2)]
    none = entries_of("ab", tokens, most_likely(PIECES), PIECES, AB)
    assert [(e.label, e.text, round(e.score, 6)) for e in none] == [("I-A", "a", 0.6), ("I-B", "b", 0.9)]


@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_many_words_at_once_are_each_as_alone(strategy: str) -> None:
    rng = np.random.default_rng(0)
    words = np.sort(rng.integers(0, 40, 100)).tolist()
    probabilities = rng.dirichlet(np.ones(3), 100).astype(np.float32)
    together = word_probabilities(probabilities, tokens_of(words), strategy)
    for number, word in enumerate(dict.fromkeys(words)):
        rows = probabilities[[i for i, w in enumerate(words) if w == word]]
        expected = {"first": rows[0], "average": rows.mean(0), "max": rows[rows.max(1).argmax()]}[strategy]
        assert together[number] == pytest.approx(expected, abs=1e-6)


def test_the_score_is_the_mean_over_words() -> None:
    labels = LabelSet(["O", "B-A", "I-A"])
    probabilities = np.array([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.9, 0.1, 0.0]], dtype=np.float32)
    (entity,) = entities_of(
        "上 海好", Tokens(np.arange(3), np.array([0, 2, 3]), np.array([1, 3, 4]), np.arange(3)),
        most_likely(probabilities), probabilities, labels, by_word=True,
    )  # fmt: skip
    assert (entity.label, entity.text) == ("A", "上 海")
    assert entity.score == pytest.approx(0.7)
    assert type(entity.score) is float
    assert type(entity.start) is int


def brute_force(probabilities: np.ndarray, labels: LabelSet) -> tuple[int, ...]:
    transitions, start, end = labels.legal_transitions(), labels.legal_start(), labels.legal_end()
    legal = (
        path
        for path in itertools.product(range(len(labels.names)), repeat=len(probabilities))
        if start[path[0]] and end[path[-1]] and all(transitions[a, b] for a, b in itertools.pairwise(path))
    )
    return max(legal, key=lambda path: sum(np.log(probabilities[t, label]) for t, label in enumerate(path)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_best_path_is_the_best_of_all_legal_ones(scheme: str) -> None:
    labels = LabelSet([*names_of(scheme, ("A", "B")), "[PAD]"])
    rng = np.random.default_rng(1)
    sequences = [
        rng.dirichlet(np.full(len(labels.names), 0.3), length).astype(np.float32) + np.float32(1e-6)
        for length in (1, 3, 0, 2, 4, 4, 3, 1, 2, 4)
    ]
    paths = best_paths(sequences, scheme_scores(labels))
    illegal = 0
    for path, probabilities in zip(paths, sequences, strict=True):
        if not len(probabilities):
            assert len(path) == 0
            continue
        assert tuple(path) == brute_force(probabilities, labels)
        strict, lenient = labels.spans(path, "strict"), labels.spans(path, "lenient")
        assert strict == lenient
        illegal += labels.spans(probabilities.argmax(1), "strict") != labels.spans(probabilities.argmax(1))
    assert illegal or scheme == "IO"  # the likeliest labels alone would not have been legal


def test_certain_probabilities_and_no_sequences() -> None:
    labels = LabelSet(["O", "B-A", "I-A"])
    certain = np.eye(3, dtype=np.float32)[[1, 2, 0]]
    assert best_paths([certain], scheme_scores(labels))[0].tolist() == [1, 2, 0]
    assert best_paths([np.eye(3, dtype=np.float32)[[2, 2]]], scheme_scores(labels))[0].tolist() in (
        [1, 2],
        [0, 0],
        [1, 1],
        [0, 1],
        [1, 0],
    )
    assert best_paths([], scheme_scores(labels)) == []


def test_marginals_are_sums_over_all_paths() -> None:
    random = np.random.default_rng(0)
    scores_of = PathScores(*(random.normal(size=shape).astype(np.float32) for shape in ((3,), (3, 3), (3,))))
    sequences = [random.dirichlet(np.ones(3), length).astype(np.float32) for length in (2, 4, 0, 1, 4, 3)]
    for probabilities, found in zip(sequences, marginals(sequences, scores_of), strict=True):
        expected = np.zeros((len(probabilities), 3))
        for path in itertools.product(range(3), repeat=len(probabilities)):
            if path:
                score = scores_of.start[path[0]] + scores_of.end[path[-1]]
                score += sum(scores_of.step[a, b] for a, b in itertools.pairwise(path))
                weight = np.exp(score) * np.prod([row[label] for row, label in zip(probabilities, path, strict=True)])
                for place, label in enumerate(path):
                    expected[place, label] += weight
        if len(probabilities):
            np.testing.assert_allclose(found, expected / expected.sum(-1, keepdims=True), atol=1e-6)
        assert found.shape == probabilities.shape
    assert marginals([], scores_of) == []


def test_marginals_of_long_and_certain_sequences_are_numbers() -> None:
    scores_of = PathScores(
        np.array([0, -30], np.float32), np.array([[0, -30], [-30, 0]], np.float32), np.zeros(2, np.float32)
    )
    certain = np.tile(np.array([[1, 0]], np.float32), (5000, 1))
    (found,) = marginals([certain], scores_of)
    np.testing.assert_allclose(found, certain, atol=1e-6)
