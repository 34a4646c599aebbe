"""How far two values are from each other, and how far they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# Largest difference that counts as the same, relative to the largest value of the reference if that is above 1.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10}
INT8_TOLERANCE = 0.1
OWN_ERRORS = 2.0  # by how many of the reference's own errors a half precision may be off


@dataclass
class Difference:
    """A candidate's value against the reference's, over everything that was added.

    `largest` and `mean` are absolute, `relative` is the norm of the difference by that of the reference, `cosine` is
    between both. `own` is the largest error that the reference itself makes in the candidate's precision.
    """

    name: str
    depth: int
    largest: float = 0.0
    scale: float = 0.0  # the reference's largest value
    own: float | None = None
    allowed: float = math.nan
    shapes: str = ""  # both, if they are not the same
    worst_batch: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # |d|, count, d², reference², candidate²
    _product: float = 0.0

    def add(self, candidate: Tensor, reference: Tensor, batch: int = 0) -> None:
        """Takes in one more batch of values of the same shape."""
        mine, wanted = candidate.double(), reference.double()
        distance = (mine - wanted).abs()
        if distance.numel() == 0:
            return
        largest = distance.max().item()  # NaN if there is one
        if not largest <= self.largest:
            self.largest, self.worst_batch = largest, batch
        self.scale = max(self.scale, wanted.abs().max().item())
        parts = (distance.sum(), distance.numel(), distance.square().sum(), wanted.square().sum(), mine.square().sum())
        self._sums = [total + float(part) for total, part in zip(self._sums, parts, strict=True)]
        self._product += (mine * wanted).sum().item()

    def add_own(self, rounded: Tensor, reference: Tensor) -> None:
        """Takes in what the reference gives in the candidate's precision."""
        error = (rounded.double() - reference.double()).abs().max().item() if reference.numel() else 0.0
        self.own = error if self.own is None else max(self.own, error)

    def mismatched(self, candidate: Tensor, reference: Tensor, batch: int = 0) -> None:
        """Notes that the shapes are not the same, which no number can say."""
        self.shapes = f"{tuple(candidate.shape)} instead of {tuple(reference.shape)}"
        self.largest, self.worst_batch = math.inf, batch

    @property
    def mean(self) -> float:
        """Of the absolute difference."""
        return math.inf if self.shapes else self._sums[0] / max(self._sums[1], 1)

    @property
    def relative(self) -> float:
        """The norm of the difference by the norm of the reference."""
        if self.shapes:
            return math.inf
        difference, reference = self._sums[2:4]
        return math.sqrt(difference / reference) if reference else (math.inf if difference else 0.0)

    @property
    def cosine(self) -> float:
        """Between both; of two zeros, 1."""
        if self.shapes:
            return math.nan
        reference, candidate = self._sums[3:]
        if not (reference and candidate):
            return 1.0 if reference == candidate else 0.0
        return self._product / math.sqrt(reference) / math.sqrt(candidate)

    @property
    def is_within(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.largest <= self.allowed

    def figures(self) -> dict[str, float | str | bool | None]:
        """Everything by name, for JSON, in which what is no number is null."""
        numbers = {
            "largest": self.largest, "mean": self.mean, "relative": self.relative, "cosine": self.cosine,
            "reference_error": self.own, "allowed": self.allowed,
        }  # fmt: skip
        finite = {name: x if x is None or math.isfinite(x) else None for name, x in numbers.items()}
        shapes = {"shapes": self.shapes} if self.shapes else {}
        return {"name": self.name, "depth": self.depth, **finite, "within": self.is_within, **shapes}


@dataclass(frozen=True)
class Bound:
    """How large a difference may be.

    In float32 and float64 `tolerance`, times the reference's largest value if that is above 1. In half precision
    twice the error that the reference itself makes in it, and one rounding step of its largest value.
    """

    dtype: torch.dtype
    tolerance: float | None = None

    def allow(self, row: Difference) -> None:
        """Says how large a value's difference may be."""
        if self.tolerance is None and self.dtype in HALF and row.own is not None:
            row.allowed = OWN_ERRORS * row.own + torch.finfo(self.dtype).eps * row.scale
        else:
            row.allowed = self._tolerance * max(1.0, row.scale)

    def allow_gradient(self, row: Difference, largest: float) -> None:
        """The same for a gradient, relative to its largest value.

        The floor is a hundredth of that for the largest gradient of the model: some true gradients are 0 (a key bias
        moves all scores of a query alike), and hold nothing but the rounding of others.
        """
        if self.tolerance is None and self.dtype in HALF and row.own is not None:
            row.allowed = OWN_ERRORS * row.own + torch.finfo(self.dtype).eps * (row.scale + 0.01 * largest)
        else:
            row.allowed = self._tolerance * (row.scale + 0.01 * largest)

    @property
    def _tolerance(self) -> float:
        return TOLERANCES.get(self.dtype, INT8_TOLERANCE) if self.tolerance is None else self.tolerance
