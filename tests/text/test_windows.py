"""Windows over long texts: every token once, with as much context as there is."""

from __future__ import annotations

import pytest

from minibert.text.windows import windows


@pytest.mark.parametrize("num_tokens", [0, 1, 9, 10, 11, 13, 14, 25, 100, 1000])
@pytest.mark.parametrize(("size", "overlap"), [(10, 0), (10, 4), (10, 9), (1, 0)])
def test_every_token_is_kept_from_exactly_one_window(num_tokens: int, size: int, overlap: int) -> None:
    kept = []
    for window in windows(num_tokens, size, overlap):
        assert window.end - window.start <= size
        assert window.start <= window.first <= window.last <= window.end
        kept += range(window.first, window.last)
    assert kept == list(range(num_tokens))


def test_a_text_that_fits_is_one_window() -> None:
    assert windows(10, 10, 4) == [(0, 10, 0, 10)]
    assert windows(0, 10, 4) == [(0, 0, 0, 0)]


def test_a_token_is_kept_where_it_stands_farther_from_an_edge() -> None:
    covering = windows(40, 10, 4)
    assert covering[:3] == [(0, 10, 0, 8), (6, 16, 8, 14), (12, 22, 14, 20)]
    for window in covering:
        for token in range(window.first, window.last):
            here = min(token - window.start, window.end - 1 - token)
            others = [w for w in covering if w != window and w.start <= token < w.end]
            inner = [w for w in others if w.start > 0 and w.end < 40 and window.start > 0 and window.end < 40]
            assert all(here >= min(token - w.start, w.end - 1 - token) for w in inner)


@pytest.mark.parametrize("overlap", [-1, 10, 11])
def test_an_impossible_overlap_is_refused(overlap: int) -> None:
    with pytest.raises(ValueError, match=f"between 0 and 9, got {overlap}"):
        windows(20, 10, overlap)
