"""What is timed: batches of token ids, always the same for one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORKLOADS = ("lat32", "b8x128", "mixed", "sorted")
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Sequences side by side, padded with 0 to the longest."""

    ids: Ids  # (B, S)
    mask: Ids  # (B, S), 1 = real token


@dataclass(frozen=True)
class Workload:
    """Batches that belong together."""

    name: str
    what: str
    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(sum(batch.mask.sum() for batch in self.batches))

    @property
    def padding(self) -> float:
        """The share of cells that hold no token."""
        return 1 - self.tokens / sum(batch.ids.size for batch in self.batches)


def workloads(vocab_size: int, names: Sequence[str] = ()) -> list[Workload]:
    """The named ones, or all: random ids, since what they mean takes no time.

    `mixed` has 64 sequences of log-normal lengths (median 45, sigma 0.7, from 8 to 256), as sentences have.
    """
    random = np.random.default_rng(0)

    def sequences(lengths: Sequence[int]) -> list[Ids]:
        return [random.integers(min(1000, vocab_size // 2), vocab_size, length) for length in lengths]

    lengths = np.clip(np.exp(random.normal(np.log(45), 0.7, 64)), 8, 256).astype(int).tolist()
    mixed = sequences(lengths)
    by_length = sorted(mixed, key=len)
    made = [
        Workload("lat32", "one sequence of 32 tokens", (padded(sequences([32])),)),
        Workload("b8x128", "eight sequences of 128", (padded(sequences([128] * 8)),)),
        Workload("mixed", "64 sequences of mixed lengths in batches of 16, as they come", batched(mixed, 16)),
        Workload("sorted", "the same, sorted by length", batched(by_length, 16)),
    ]
    return [workload for workload in made if not names or workload.name in names]


def batched(sequences: Sequence[Ids], size: int) -> tuple[Batch, ...]:
    """Neighbours in batches of `size`."""
    return tuple(padded(sequences[start : start + size]) for start in range(0, len(sequences), size))


def padded(sequences: Sequence[Ids]) -> Batch:
    """One batch."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return Batch(ids, mask)
