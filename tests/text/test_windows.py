"""Windows over long texts: every token, words and sentences whole where they can be, and entities whole."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from minibert import MinibertError
from minibert.text.labels import LabelSet
from minibert.text.windows import sentence_starts, stitched, windows


def every(length: int, step: int = 1) -> np.ndarray:
    return np.arange(length) % step == 0


@pytest.mark.parametrize("num_tokens", [1, 9, 10, 11, 13, 14, 25, 100, 1000])
@pytest.mark.parametrize(("size", "overlap"), [(10, 0), (10, 3), (10, 5), (1, 0), (62, 15)])
@pytest.mark.parametrize("seed", range(5))
def test_windows_cover_every_token_and_meet_their_neighbours_only(
    num_tokens: int, size: int, overlap: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    words, sentences = rng.random(num_tokens) < 0.6, rng.random(num_tokens) < 0.1
    places = windows(size, overlap, words, words & sentences)
    assert places[0][0] == 0
    assert places[-1][1] == num_tokens
    assert all(0 < end - start <= size for start, end in places)
    for (start, end), (next_start, next_end) in itertools.pairwise(places):
        assert start < next_start <= end < next_end
    for (_, end), (start, _) in zip(places, places[2:], strict=False):
        assert end <= start
    assert len(places) <= 2 + num_tokens // max(1, size - 2 * overlap - size // 3)


def test_a_text_that_fits_is_one_window() -> None:
    assert windows(10, 4, every(10), every(10)) == [(0, 10)]


def test_a_window_begins_and_ends_with_a_word_and_where_possible_with_a_sentence() -> None:
    none = np.zeros(200, dtype=bool)
    assert windows(62, 15, every(200, 3), none)[:3] == [(0, 60), (45, 105), (90, 150)]
    assert windows(62, 15, every(200), every(200, 10))[:3] == [(0, 60), (40, 100), (80, 140)]
    assert windows(62, 15, every(200), every(200, 40))[:3] == [(0, 62), (40, 102), (80, 142)]
    assert windows(62, 15, none, none)[:2] == [(0, 62), (47, 109)]  # one endless word


def test_a_sentence_begins_behind_its_end_mark_or_a_line_break() -> None:
    text = "好！！走。\n京 a\r\n\r\n住？"
    starts = np.array([i for i, c in enumerate(text) if not c.isspace()])
    begins = sentence_starts(text, starts)
    assert "".join(text[start] for start in starts[begins]) == "好走京住"


@pytest.mark.parametrize("overlap", [-1, 6, 10])
def test_an_impossible_overlap_is_refused(overlap: int) -> None:
    with pytest.raises(MinibertError, match=f"stride: expected an overlap of 0 to 5 tokens, .* got {overlap}"):
        windows(10, overlap, every(20), every(20))


LABELS = LabelSet(["O", "B-A", "I-A"])


def distributions(ids: list[int]) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[ids] * 0.8 + 0.1


def test_windows_that_agree_give_what_they_agree_on() -> None:
    rng = random.Random(0)
    for _ in range(300):
        length = rng.randint(11, 80)
        ids = [0] * length
        while (place := rng.randint(0, length - 1)) < length - 5:
            ids[place : place + 4] = [1, 2, 2, 2]
        expected = distributions(ids)
        words = np.array([rng.random() < 0.7 for _ in range(length)])
        places = windows(10, rng.choice([0, 2, 5]), words, np.zeros(length, dtype=bool))
        got = stitched([expected[start:end] for start, end in places], places, words, LABELS)
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # What each window sees in the six places they share; the middle is the fourth.
        ("0BII00", "00BII0", [("A", 6, 9)]),  # two views that overlap: the cut goes where none passes
        ("00B000", "000I00", [("A", 7, 8)]),  # not one entity of the halves of two
        ("BIIIII", "BIIIII", [("A", 4, 10)]),  # no place is free; both say the same
        ("000000", "0BI000", []),  # the window with more around the place sees none there
        ("000BI0", "000000", []),
    ],
)
def test_an_entity_is_taken_whole_from_one_window(
    before: str, after: str, expected: list[tuple[str, int, int]]
) -> None:
    one, other = (["0BI".index(letter) for letter in text] for text in ("0000" + before, after + "0000"))
    got = stitched([distributions(one), distributions(other)], [(0, 10), (4, 14)], every(14), LABELS)
    assert LABELS.spans(got.argmax(1)) == expected


def test_the_cut_is_in_the_middle_where_nothing_stands_against_it() -> None:
    first, second = np.full((10, 3), 0.2, np.float32), np.full((10, 3), 0.4, np.float32)
    first[:, 0], second[:, 0] = 0.6, 0.5
    got = stitched([first, second], [(0, 10), (4, 14)], every(14), LABELS)
    assert got[:, 1].round(1).tolist() == [np.float32(0.2).round(1).item()] * 7 + [np.float32(0.4).round(1).item()] * 7
