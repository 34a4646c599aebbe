"""Matrix products with weights that are laid out, or rounded, once, for the processor at hand.

A kernel takes over one Linear, or several of the same input as one product. What PyTorch has for this is no public
interface (`torch.ops.mkldnn`, `torch.ops.quantized`), so each kernel is tried on a small product first, and left alone
where it is missing or wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibert.errors import MinibertError

GELU = "gelu"  # the erf form, https://arxiv.org/abs/1606.08415


class Kernel(nn.Module):
    """A Linear by its weight (out, in) and bias (out,), perhaps with GELU behind it."""

    name: str

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        self.bias, self.activation = bias, activation
        self.weight = self.prepared(weight)

    def prepared(self, weight: Tensor) -> Any:
        """The weight as the kernel wants it."""
        return weight.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out)."""
        raise NotImplementedError

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product and a residual (T, out)."""
        product: Tensor = self(x)
        return product.add_(residual)


class PlainLinear(Kernel):
    """`F.linear`: the kernel that is always there."""

    name = "PyTorch"

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return F.gelu(product) if self.activation == GELU else product


class OneDnnLinear(Kernel):
    """oneDNN with the weights in its own blocked layout, and what follows the product done while it is in cache."""

    name = "prepacked oneDNN"

    def prepared(self, weight: Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def forward(self, x: Tensor) -> Tensor:
        attribute, algorithm = (GELU, "none") if self.activation == GELU else ("none", "")
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, attribute, [], algorithm)
        return product

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return total


class Int8Linear(Kernel):
    """Weights in int8 with a scale for each output channel; inputs in 7 or 8 bits with one scale, found as they come.

    Eight bits by eight bits are summed in pairs in 16 bits where the processor has no VNNI, which may overflow; seven
    bits cannot.
    """

    name = "dynamic quantization"

    def prepared(self, weight: Tensor) -> Any:
        self.reduce_range = not has_vnni()
        scales = weight.abs().amax(1).clamp(min=1e-8).double() / 127
        zeros = torch.zeros(len(weight), dtype=torch.long)
        rounded = torch.quantize_per_channel(weight.contiguous(), scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        try:
            product: Tensor = torch.ops.quantized.linear_dynamic(x, self.weight, self.reduce_range)
        except RuntimeError:
            check_finite(x)
            raise
        return F.gelu(product) if self.activation == GELU else product


class OneDnnInt8Linear(Kernel):
    """The same by oneDNN, with GELU or a residual done while the product is in cache: 1.3 times the speed of the other
    at a thousand rows on an EPYC with VNNI."""

    name = "oneDNN int8"

    def prepared(self, weight: Tensor) -> Any:
        if not has_vnni():
            raise NotImplementedError("without VNNI the other kernel is the faster one")
        self.scales = weight.abs().amax(1).clamp(min=1e-8) / 127
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)
        rounded = (weight / self.scales[:, None]).round().to(torch.int8)
        return torch.ops.onednn.qlinear_prepack(rounded, None)

    def forward(self, x: Tensor) -> Tensor:
        name, algorithm = (GELU, "none") if self.activation == GELU else ("none", "")
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *rounded_to_bytes(x), self.weight, self.scales, self.zeros, self.bias, 1.0, 0, torch.float32,
            name, [], algorithm,
        )  # fmt: skip
        return product

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        total: Tensor = torch.ops.onednn.qlinear_pointwise.binary(
            *rounded_to_bytes(x), self.weight, self.scales, self.zeros, residual, self.bias, 1.0, 0, torch.float32,
            1.0, 0, "add", 1.0, "none", [], "",
        )  # fmt: skip
        return total


def rounded_to_bytes(x: Tensor) -> tuple[Tensor, float, int]:
    """x as bytes b, a scale s and a zero point z: x is within s / 2 of s * (b - z), and 0 is met exactly.

    Raises:
        MinibertError: x holds NaN or infinity.
    """
    if not x.numel():
        return x.to(torch.uint8), 1.0, 0
    lowest, highest = torch.aminmax(x)
    low, high = min(lowest.item(), 0.0), max(highest.item(), 0.0)
    if not math.isfinite(high - low):
        check_finite(x)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    quantized = torch.quantize_per_tensor(x, scale, zero, torch.quint8)
    # The bytes themselves; int_repr would copy them, by one thread.
    as_bytes = torch.empty(0, dtype=torch.uint8).set_(quantized.untyped_storage(), 0, x.shape, x.stride())
    return as_bytes, scale, zero


def check_finite(hidden_states: Tensor) -> None:
    """Refuses what has no steps to be rounded to."""
    if not hidden_states.isfinite().all():
        raise MinibertError("int8: the hidden states hold NaN or infinity, so the model's weights are broken")


KERNELS = {"fp32": (OneDnnLinear, PlainLinear), "int8": (OneDnnInt8Linear, Int8Linear)}


def has_vnni() -> bool:
    """Whether the processor sums products of int8 in 32 bits; False if that cannot be found out."""
    probe = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(probe and probe())


@cache
def kernel_for(precision: str) -> type[Kernel] | None:
    """The first kernel of a precision that works here; None if none does."""
    return next((kernel for kernel in KERNELS[precision] if _works(kernel)), None)


def _works(kernel: type[Kernel]) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 64, generator=generator) for size in (5, 48))
    bias, residual = torch.randn(48, generator=generator), torch.randn(5, 48, generator=generator)
    tolerance = 1e-4 if kernel in KERNELS["fp32"] else 0.5
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # That torch is to part with quantized tensors, which it says once in a process; then their kernels go.
            warnings.simplefilter("ignore")
            plain = F.linear(x, weight, bias)
            pairs = [(kernel(weight, bias)(x), plain), (kernel(weight, bias, GELU)(x), F.gelu(plain))]
            pairs.append((kernel(weight, bias).add(x, residual), plain + residual))
            pairs.append((kernel(weight, None)(x), F.linear(x, weight)))
    except (AttributeError, RuntimeError, NotImplementedError):  # no such operator, or not for this processor
        return False
    return all(torch.allclose(ours, right, rtol=0, atol=tolerance) for ours, right in pairs)


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several Linears of one input as those of one."""
    if len(linears) == 1:
        return linears[0].weight.detach(), None if linears[0].bias is None else linears[0].bias.detach()
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return weight, torch.cat(biases) if biases else None
