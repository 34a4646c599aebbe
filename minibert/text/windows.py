"""Overlapping windows over a text that is longer than the model, and one result from what they say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minibert.errors import MinibertError
from minibert.text.labels import Bools, Floats, Ints, LabelSet

SENTENCE_ENDS = "。！？!?；;…\n\r\u2028\u2029"


def sentence_starts(text: str, starts: Ints) -> Bools:
    """(T,) bool: tokens that stand behind a sentence's end or a line's, from where tokens start (T,)."""
    is_end = np.isin(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), [ord(end) for end in SENTENCE_ENDS])
    ends_before = np.append(0, np.cumsum(is_end))  # up to each character
    result = np.zeros(len(starts), dtype=bool)
    if len(starts):
        result[0] = True
        result[1:] = (np.diff(ends_before[starts]) > 0) & ~is_end[starts[1:]]  # not between the two of "！！"
    return result


def windows(size: int, overlap: int, begins_word: Bools, begins_sentence: Bools) -> list[tuple[int, int]]:
    """Covers T tokens by windows (start, end) of at most `size` that share about `overlap` tokens with the next.

    A window starts where a sentence does and ends where one does, if there is such a place within `overlap` tokens;
    else where a word does; a word is cut only if it is longer than that.
    """
    if not 0 <= overlap <= size // 2:
        raise MinibertError(f"stride: expected an overlap of 0 to {size // 2} tokens, half a window, got {overlap}")
    num_tokens = len(begins_word)
    slack = min(overlap, (size - 2 * overlap) // 3)  # so that a window meets its neighbours only
    found = []
    start = 0
    while True:
        end = min(start + size, num_tokens)
        if end < num_tokens:
            end = _boundary(end - slack, end, begins_word, begins_sentence)
        found.append((start, end))
        if end == num_tokens:
            return found
        start = max(start + 1, _boundary(end - overlap - slack, end - overlap, begins_word, begins_sentence))


def _boundary(first: int, last: int, begins_word: Bools, begins_sentence: Bools) -> int:
    """The last place from `first` to `last` where a sentence begins, else a word, else `last`."""
    for begins in (begins_sentence, begins_word):
        places = np.flatnonzero(begins[first : last + 1])
        if len(places):
            return first + int(places[-1])
    return last


def stitched(
    parts: Sequence[Floats], places: Sequence[tuple[int, int]], begins_word: Bools, labels: LabelSet
) -> Floats:
    """One distribution a token, (T, K), from those of overlapping windows.

    Between two windows the text is cut once: as near to the middle of what they share as possible, where each has
    most context, but where neither sees an entity pass; so an entity is taken whole from one window.
    """
    kept = [parts[0]]
    for (_, end), (start, _), before, after in zip(places[:-1], places[1:], parts[:-1], parts[1:], strict=True):
        shared = end - start
        cut = _cut(before[-shared:], after[:shared], begins_word[start:end], labels) if shared > 1 else 0
        kept[-1] = kept[-1][: len(kept[-1]) - (shared - cut)]
        kept.append(after[cut:])
    return np.concatenate(kept)


def _cut(before: Floats, after: Floats, begins_word: Bools, labels: LabelSet) -> int:
    shared = len(before)
    one, other = before.argmax(axis=1), after.argmax(axis=1)
    passes = labels.continues[one[:-1], one[1:]] | labels.continues[other[:-1], other[1:]]
    passes |= labels.continues[one[:-1], other[1:]]
    by_distance = sorted(range(1, shared), key=lambda place: abs(2 * place - shared))
    free = [place for place in by_distance if begins_word[place] and not passes[place - 1]]
    words = [place for place in by_distance if begins_word[place]]
    return (free or words or [shared // 2])[0]
