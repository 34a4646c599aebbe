"""Overlapping windows over a text that is longer than the model."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Tokens `start` to `end` go through the model together; results are kept for `first` to `last` of them."""

    start: int
    end: int
    first: int
    last: int


def windows(num_tokens: int, size: int, overlap: int) -> list[Window]:
    """Covers `num_tokens` tokens by windows of at most `size` that share `overlap` tokens with their neighbours.

    Each token is kept from one window only, the one in which it stands farther from an edge.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"overlap must lie between 0 and {size - 1}, got {overlap}")
    starts = list(range(0, max(num_tokens - overlap, 1), size - overlap))
    cuts = [0, *(start + overlap // 2 for start in starts[1:]), num_tokens]
    return [
        Window(start, min(start + size, num_tokens), first, last)
        for start, first, last in zip(starts, cuts[:-1], cuts[1:], strict=True)
    ]
