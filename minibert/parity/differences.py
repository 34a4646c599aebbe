"""How far two values are from each other, and how far they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# By how many of the reference's own errors a candidate may be off, and by how many rounding steps besides, at most and
# by the norm: other kernels round elsewhere, and a largest error is a matter of luck.
LARGEST = {torch.float32: 10.0, torch.bfloat16: 2.0, torch.float16: 2.0}
BY_NORM = {torch.float32: 5.0, torch.bfloat16: 2.0, torch.float16: 2.0}
STEPS = {torch.float32: 10.0, torch.bfloat16: 1.0, torch.float16: 1.0}
MANY = 256  # numbers; of fewer even the norm of an error is a matter of luck, and ten times the steps are allowed
# Where the reference's error is not known: of its largest value, if that is above 1.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.05, torch.float16: 0.01}
INT8_TOLERANCE = 0.2


@dataclass
class Difference:
    """A candidate's value against the reference's, over everything that was added.

    `largest` and `mean` are absolute, `relative` is the norm of the difference by that of the reference, `cosine` is
    between both. `own` is the largest error that the reference itself makes in the candidate's precision, against what
    it gives in a wider one.
    """

    name: str
    depth: int
    largest: float = 0.0
    scale: float = 0.0  # the reference's largest value
    own: float | None = None
    allowed: float = math.nan
    allowed_relative: float = math.inf
    shapes: str = ""  # both, if they are not the same
    worst_batch: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # |d|, count, d², reference², candidate²
    _product: float = 0.0
    _own_square: float = 0.0

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
        squares = [x.square().sum().item() for x in (distance, wanted, mine)]
        parts = [distance.sum().item(), distance.numel(), *squares]
        self._sums = [total + part for total, part in zip(self._sums, parts, strict=True)]
        self._product += (mine * wanted).sum().item()

    def add_own(self, other: Tensor, reference: Tensor) -> None:
        """Takes in what the reference gives in another precision than here."""
        distance = (other.double() - reference.double()).abs()
        error = distance.max().item() if distance.numel() else 0.0
        self.own = error if self.own is None else max(self.own, error)
        self._own_square += distance.square().sum().item()

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
    def own_relative(self) -> float:
        """The norm of the reference's own error by that of the reference."""
        return math.sqrt(self._own_square / self._sums[3]) if self._sums[3] else 0.0

    @property
    def count(self) -> int:
        """Numbers that were compared."""
        return int(self._sums[1])

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
        return self.largest <= self.allowed and self.relative <= self.allowed_relative

    @property
    def excess(self) -> str:
        """What is too large, and how large it may be; empty if nothing is."""
        if self.is_within:
            return ""
        return (
            f"above {self.allowed:.2e}"
            if not self.largest <= self.allowed
            else (f"relative above {self.allowed_relative:.2e}")
        )

    def figures(self) -> dict[str, float | str | bool | None]:
        """Everything by name, for JSON, in which what is no number is null."""
        numbers: dict[str, float | None] = {
            "largest": self.largest, "mean": self.mean, "relative": self.relative, "cosine": self.cosine,
            "reference_error": self.own, "allowed": self.allowed, "allowed_relative": self.allowed_relative,
        }  # fmt: skip
        finite = {name: x if x is None or math.isfinite(x) else None for name, x in numbers.items()}
        shapes = {"shapes": self.shapes} if self.shapes else {}
        return {"name": self.name, "depth": self.depth, **finite, "within": self.is_within, **shapes}


@dataclass(frozen=True)
class Bound:
    """How large a difference may be, at most and by the norm, in terms of the reference's own error in that precision.

    A fault in few numbers shows in the largest difference, a small one everywhere, such as another eps, in the norm.
    With `tolerance`, or where that error is not known, that number times the reference's largest value if that is
    above 1.
    """

    dtype: torch.dtype
    tolerance: float | None = None

    def allow(self, row: Difference) -> None:
        """Says how large a value's difference may be."""
        row.allowed = self._allowed(row, row.scale, max(1.0, row.scale))
        if self.tolerance is None and row.own is not None and row.count >= MANY:
            eps = torch.finfo(self.dtype).eps
            row.allowed_relative = BY_NORM[self.dtype] * (row.own_relative + eps)

    def allow_gradient(self, row: Difference, largest: float) -> None:
        """The same for a gradient, relative to its largest value.

        The floor is a tenth of that for the largest gradient of the model: some true gradients are 0 (a key bias moves
        all scores of a query alike), and hold nothing but the rounding of others.
        """
        scale = row.scale + 0.1 * largest
        row.allowed = self._allowed(row, scale, scale)

    def _allowed(self, row: Difference, steps_of: float, tolerance_of: float) -> float:
        if self.tolerance is None and row.own is not None:
            steps = STEPS[self.dtype] * (1 if row.count >= MANY else 10)
            return LARGEST[self.dtype] * row.own + steps * torch.finfo(self.dtype).eps * steps_of
        return (TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance) * tolerance_of
