"""Probabilities of tokens to labels of words, and these to entities. T tokens, W words, K labels, B sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from minibert.text.alignment import Tokens
from minibert.text.labels import OUTSIDE, Floats, Ints, LabelSet

STRATEGIES = ("none", "simple", "first", "average", "max")
DECODERS = ("argmax", "viterbi", "crf")


@dataclass(frozen=True)
class Entity:
    """An entity: its type, its place `text[start:end]` in the caller's string, that text, and how sure the model is.

    The score is the mean, over the entity's tokens or words, of the probability of the label each was given; with a
    CRF, of its probability given the whole text.
    """

    label: str
    start: int
    end: int
    text: str
    score: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def word_probabilities(probabilities: Floats, tokens: Tokens, strategy: str) -> Floats:
    """(W, K): one distribution a word that has tokens, from (T, K).

    first: its first token's; average: the mean of all; max: that of the token which is surest of its label.
    """
    starts = np.flatnonzero(tokens.begins_word)
    if strategy == "first" or len(starts) == len(tokens):
        return probabilities[starts]
    counts = np.diff(starts, append=len(tokens))
    if strategy == "average":
        sums: Floats = np.add.reduceat(probabilities, starts, axis=0)
        averages: Floats = (sums / counts[:, None]).astype(np.float32)
        return averages
    surest = probabilities.max(axis=1)
    is_best = surest == np.repeat(np.maximum.reduceat(surest, starts), counts)
    best = np.flatnonzero(is_best)
    word_of_best = np.repeat(np.arange(len(starts)), counts)[best]
    return probabilities[best[np.flatnonzero(np.diff(word_of_best, prepend=-1))]]


def most_likely(probabilities: Floats) -> Ints:
    """(W,): each word's most likely label, whatever stands beside it."""
    labels: Ints = probabilities.argmax(axis=1)
    return labels


class PathScores(NamedTuple):
    """What a path gains or loses by its first label (K,), by label j behind label i (K, K), and by its last (K,)."""

    start: Floats
    step: Floats
    end: Floats


def scheme_scores(labels: LabelSet) -> PathScores:
    """0 for what the scheme allows, and for the rest so little that no path takes it if there is another."""
    legal = (labels.legal_start(), labels.legal_transitions(), labels.legal_end())
    return PathScores(*(np.where(allowed, np.float32(0), np.float32(-1e9)).astype(np.float32) for allowed in legal))


def best_paths(sequences: Sequence[Floats], scores_of: PathScores) -> list[Ints]:
    """The best label sequence (W,) for each sequence of probabilities (W, K): their logarithms and the path's scores.

    The Viterbi algorithm (Forney, "The Viterbi algorithm", 1973), one step for all sequences at a time.
    """
    order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
    lengths = np.array([len(sequences[row]) for row in order], dtype=np.int64)
    results: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    if not len(lengths) or not lengths[0]:
        return results
    scores = np.zeros((lengths[0], len(order), len(scores_of.start)), dtype=np.float32)
    for row, place in enumerate(order):
        with np.errstate(divide="ignore"):
            scores[: lengths[row], row] = np.maximum(np.log(sequences[place]), np.float32(-1e4))
    came_from = np.zeros(scores.shape, dtype=np.int16)
    best = scores[0] + scores_of.start
    final = best.copy()
    for step in range(1, lengths[0]):
        active = int(np.searchsorted(-lengths, -step, side="left"))  # sequences longer than `step`
        options = best[:active, :, None] + scores_of.step
        came_from[step, :active] = options.argmax(axis=1)
        best = options.max(axis=1) + scores[step, :active]
        final[:active] = best
    last = (final + scores_of.end).argmax(axis=1)
    for row, place in enumerate(order):
        path = np.zeros(lengths[row], dtype=np.int64)
        label = int(last[row])
        previous = came_from[: lengths[row], row]
        for step in range(lengths[row] - 1, -1, -1):
            path[step] = label
            label = int(previous[step, label])
        results[place] = path
    return results


def marginals(sequences: Sequence[Floats], scores_of: PathScores) -> list[Floats]:
    """Each label's probability at each place (W, K), over all paths as `best_paths` scores them.

    The forward-backward algorithm (Rabiner, "A tutorial on hidden Markov models", 1989, section III.A), one step for
    all sequences at a time.
    """
    order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
    lengths = np.array([len(sequences[row]) for row in order], dtype=np.int64)
    if not len(lengths) or not lengths[0]:
        return list(sequences)
    start, step, end = (np.exp(part.astype(np.float64)) for part in scores_of)
    weights = np.zeros((lengths[0], len(order), len(start)))
    for row, place in enumerate(order):
        weights[: lengths[row], row] = np.maximum(sequences[place], 1e-30)
    forward = weights.copy()  # of all paths to a label, up to a factor for each place
    forward[0] *= start
    backward = np.broadcast_to(end, weights.shape).copy()  # of all paths from it
    for at in range(1, lengths[0]):
        active = int(np.searchsorted(-lengths, -at, side="left"))
        forward[at, :active] *= _normed(forward[at - 1, :active] @ step)
    for at in range(lengths[0] - 2, -1, -1):
        active = int(np.searchsorted(-lengths, -(at + 1), side="left"))
        backward[at, :active] = _normed((weights[at + 1, :active] * backward[at + 1, :active]) @ step.T)
    both = _normed(forward * backward).astype(np.float32)
    results = list(sequences)
    for row, place in enumerate(order):
        results[place] = both[: lengths[row], row]
    return results


def _normed(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normed: npt.NDArray[np.float64] = values / np.maximum(values.sum(-1, keepdims=True), 1e-300)
    return normed


def entities_of(
    text: str,
    tokens: Tokens,
    chosen: Ints,
    probabilities: Floats,
    labels: LabelSet,
    *,
    by_word: bool,
) -> list[Entity]:
    """Entities from the chosen label of each word (or token) and the distributions (W, K) it was chosen from."""
    if not len(chosen):
        return []
    first = np.flatnonzero(tokens.begins_word) if by_word else np.arange(len(tokens))
    last = np.append(first[1:], len(tokens)) - 1
    starts, ends = labels.runs(chosen)
    if not len(starts):
        return []
    scores = probabilities[np.arange(len(chosen)), chosen].astype(np.float64)
    totals = np.append(0.0, np.cumsum(scores))
    means = (totals[ends] - totals[starts]) / (ends - starts)
    places = zip(tokens.starts[first[starts]].tolist(), tokens.ends[last[ends - 1]].tolist(), strict=True)
    return [
        Entity(labels.types[label], start, end, text[start:end], min(max(mean, 0.0), 1.0))
        for label, (start, end), mean in zip(chosen[starts].tolist(), places, means.tolist(), strict=True)
    ]


def entries_of(text: str, tokens: Tokens, chosen: Ints, probabilities: Floats, labels: LabelSet) -> list[Entity]:
    """One entry a token that is not outside, with its full label."""
    return [
        Entity(labels.names[label], start, end, text[start:end], float(probabilities[place, label]))
        for place in np.flatnonzero(labels.roles[chosen] != OUTSIDE).tolist()
        for label, start, end in [(int(chosen[place]), int(tokens.starts[place]), int(tokens.ends[place]))]
    ]
