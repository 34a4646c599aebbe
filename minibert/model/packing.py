"""Padded batch to packed tokens and back: padding is removed once, before the embeddings, and put back once.

Shapes: B sequences of S cells each, T real tokens in all, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from minibert.errors import MinibertError


def is_tracing() -> bool:
    """Whether `torch.compile`, `torch.export` or `torch.jit.trace` records the operations instead of a plain run."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a padded batch are.

    Between embeddings and head every tensor is (T, C), the real tokens one after another; only attention needs
    to know where a sequence ends. Four layouts share this class: no padding (`indices` and `mask` are None,
    T = B * S), padding removed (`indices`), sequences that came one behind another in one row (`lengths` alone,
    B = 1, T = S), and the padded layout (`mask`), kept for masks that are not about padding and for tracing, where
    the number of real tokens would be baked into the graph.
    """

    batch_size: int
    seq_len: int
    lengths: Sequence[int] = ()  # real tokens of each sequence; () if there are S in each
    indices: Tensor | None = None  # (T,) int64, the real tokens' places among the B * S cells
    mask: Tensor | None = None  # (B, 1 or H, 1 or S, S): bool, True = attend, or float, added to the scores
    padding: Tensor | None = None  # (B, S) bool, True = padding; only beside a `mask` made from it
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # what all layers ask for

    @classmethod
    def from_mask(cls, attention_mask: Tensor | None, batch_size: int, seq_len: int, num_heads: int) -> Packing:
        """Reads an attention mask, checking it once and for all.

        Args:
            attention_mask: None (every token is real); or (B, S) with 1/True for real tokens, of any integer,
                bool or 0/1 float dtype; or (B, S, S), (B, 1, S, S) or (B, H, S, S), bool or 0/1 integer with
                1/True for "this query attends to this key", or float, added to the scores.

        Raises:
            MinibertError: for any other shape or value, which is named.
        """
        if attention_mask is None:
            return cls(batch_size, seq_len)
        if attention_mask.dim() != 2:
            mask = _check_full_mask(attention_mask, batch_size, seq_len, num_heads)
            return cls(batch_size, seq_len, mask=mask)
        if attention_mask.shape != (batch_size, seq_len):
            raise _wrong_shape(attention_mask, batch_size, seq_len, num_heads)
        if not is_tracing():
            _check_zero_one(attention_mask)
        real = attention_mask.bool()
        if is_tracing():
            return cls(batch_size, seq_len, mask=real[:, None, None, :], padding=~real)
        lengths = real.sum(1).tolist()
        if sum(lengths) == batch_size * seq_len:
            return cls(batch_size, seq_len)
        return cls(batch_size, seq_len, lengths, indices=real.flatten().nonzero().squeeze(1))

    @classmethod
    def from_lengths(cls, lengths: Tensor, batch_size: int, seq_len: int) -> Packing:
        """Sequences that lie one behind another in one row, (1, S), from how many tokens each has, (N,).

        Raises:
            MinibertError: not one row, or lengths that are not positive integers that add up to S.
        """
        if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise MinibertError(
                f"sequence_lengths: expected integers of shape (sequences,), got {lengths.dtype} {tuple(lengths.shape)}"
            )
        counts = lengths.tolist()
        if batch_size != 1 or sum(counts) != seq_len or min(counts, default=0) < 1:
            raise MinibertError(
                f"sequence_lengths: expected positive numbers that add up to the tokens of one row, got {len(counts)} "
                f"that add up to {sum(counts)}, for input of shape {(batch_size, seq_len)}"
            )
        return cls(batch_size, seq_len, counts)

    @classmethod
    def from_boundaries(cls, boundaries: Tensor, tokens: int, longest: int) -> Packing:
        """Sequences whose lengths may change on the device, for attention "varlen" alone: what `boundaries` returns."""
        return cls(1, tokens, _made={"boundaries": (boundaries, longest)})

    def by_sequence(self, device: torch.device) -> Packing:
        """The same tokens as a batch with a row for each sequence, as wide as the longest."""
        if self.indices is not None or not self.lengths:
            return self
        width = max(self.lengths)
        cells = [row * width + torch.arange(length) for row, length in enumerate(self.lengths)]
        return Packing(len(self.lengths), width, self.lengths, torch.cat(cells).to(device))

    def positions(self, device: torch.device) -> Tensor:
        """(S,) int64: where in its sequence each cell of a row stands."""
        if self.indices is None and self.lengths:
            positions = torch.cat([torch.arange(length) for length in self.lengths])
            return positions.to(device)  # one copy instead of a launch for each
        return torch.arange(self.seq_len, device=device)

    def boundaries(self, device: torch.device) -> tuple[Tensor, int]:
        """(N + 1,) int32, where each of N sequences begins among the packed tokens, and T; and how long the longest is.

        Made once, for all layers.
        """
        if "boundaries" not in self._made:
            lengths = self.every_length
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            self._made["boundaries"] = starts, max(lengths, default=0)
        return cast("tuple[Tensor, int]", self._made["boundaries"])

    def in_rows(self, device: torch.device) -> tuple[Packing, Tensor]:
        """The tokens as a batch with a row for each sequence, and (B, 1, 1, S) bool, True where a cell holds one.

        Made once, for all layers.
        """
        if "rows" not in self._made:
            rows = self.by_sequence(device)
            real = rows.unpack(torch.ones(self.tokens, dtype=torch.bool, device=device))
            self._made["rows"] = rows, real[:, None, None, :]
        return cast("tuple[Packing, Tensor]", self._made["rows"])

    @property
    def every_length(self) -> Sequence[int]:
        """Tokens of each sequence, of those without padding, too."""
        return self.lengths or [self.seq_len] * self.batch_size

    @property
    def tokens(self) -> int:
        """How many are packed, T."""
        return sum(self.lengths) if self.lengths else self.batch_size * self.seq_len

    @property
    def longest(self) -> int:
        """Cells of the longest sequence."""
        return max(self.lengths) if self.indices is None and self.lengths else self.seq_len

    def pack(self, x: Tensor) -> Tensor:
        """(B, S, ...) to the real tokens (T, ...)."""
        x = x.flatten(0, 1)
        return x if self.indices is None else x.index_select(0, self.indices)

    def unpack(self, x: Tensor) -> Tensor:
        """(T, ...) to (B, S, ...), zero at padding."""
        if self.indices is not None:
            x = x.new_zeros(self.batch_size * self.seq_len, *x.shape[1:]).index_copy(0, self.indices, x)
        x = x.view(self.batch_size, self.seq_len, *x.shape[1:])
        return x if self.padding is None else x.masked_fill(self.padding.unsqueeze(-1), 0)

    def unpack_weights(self, weights: Sequence[Tensor], num_heads: int) -> Tensor:
        """Attention weights (H, length, length) of every non-empty sequence to (B, H, S, S), zero at padding."""
        cells = torch.arange(self.seq_len) if self.indices is None else self.indices
        dtype = weights[0].dtype if weights else torch.get_default_dtype()
        device = weights[0].device if weights else cells.device
        padded = torch.zeros(self.batch_size, num_heads, self.seq_len, self.seq_len, dtype=dtype, device=device)
        sequences = [cells_of for cells_of in cells.to(device).split(list(self.lengths)) if len(cells_of)]
        for cells_of, matrix in zip(sequences, weights, strict=True):
            row, columns = cells_of[0] // self.seq_len, cells_of % self.seq_len
            padded[row, :, columns[:, None], columns] = matrix
        return padded

    def first_tokens(self, x: Tensor) -> Tensor:
        """(T, C) to each sequence's first real token (B, C); zero for a sequence without one."""
        if self.padding is not None:
            first = (~self.padding).int().argmax(1)
            firsts: Tensor = self.unpack(x).gather(1, first[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
            return firsts
        if self.seq_len == 0:
            return x.new_zeros(self.batch_size, *x.shape[1:])
        if not self.lengths:
            return x.view(self.batch_size, self.seq_len, *x.shape[1:])[:, 0]
        lengths = torch.tensor(self.lengths, device=x.device)
        non_empty = lengths > 0
        starts = lengths.cumsum(0) - lengths
        firsts = x.new_zeros(len(lengths), *x.shape[1:])
        firsts[non_empty] = x[starts[non_empty]]
        return firsts


def _wrong_shape(mask: Tensor, batch_size: int, seq_len: int, num_heads: int) -> MinibertError:
    b, s, h = batch_size, seq_len, num_heads
    return MinibertError(
        f"attention_mask: expected shape {(b, s)}, {(b, s, s)}, {(b, 1, s, s)} or {(b, h, s, s)} for {b} sequences "
        f"of {s} tokens and {h} heads, got {tuple(mask.shape)}"
    )


def _check_zero_one(mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        return
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise MinibertError(
            f"attention_mask: expected 1 (real token, or attend) and 0, got {wrong[0].item()}; a mask to be added to "
            "the scores must be float and have 3 or 4 dimensions"
        )


def _check_full_mask(mask: Tensor, batch_size: int, seq_len: int, num_heads: int) -> Tensor:
    """A mask with one entry for every query and key, as (B, 1 or H, S, S): bool, or float to be added."""
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if mask.dim() != 4 or mask.shape not in {(batch_size, h, seq_len, seq_len) for h in (1, num_heads)}:
        raise _wrong_shape(mask, batch_size, seq_len, num_heads)
    if not mask.is_floating_point():
        if not is_tracing():
            _check_zero_one(mask)
        return mask.bool()
    if not is_tracing():
        if not (mask < float("inf")).all():
            raise MinibertError("attention_mask: a float mask is added to the scores, but it holds NaN or +inf")
        if (mask == 1).any() and ((mask == 0) | (mask == 1)).all():
            raise MinibertError(
                "attention_mask: a float mask of 3 or 4 dimensions is added to the scores, but this one holds only 0 "
                "and 1; pass mask.bool() to say who attends to whom, or 0 and -inf to add"
            )
    # The lowest value of whatever dtype the mask was made in means "blocked"; in another dtype it would be a number.
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))
