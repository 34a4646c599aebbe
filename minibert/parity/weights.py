"""Stored parameters that are not the reference's: in what way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

UNRELATED = 0.1  # cosine below which two matrices have nothing to do with each other


def changed_parameters(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters that both have and that differ by more than rounding to the candidate's dtype."""
    return [name for name, tensor in own.items() if name in reference and not _same(tensor, reference[name])]


def describe_layer(prefix: str, own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """What has happened to a whole layer, if most of its parameters tell the same story; `prefix` ends in a dot."""
    names = [name for name in own if name.startswith(prefix) and name in reference]
    changed = changed_parameters({name: own[name] for name in names}, reference)
    matrices = [name for name in changed if own[name].dim() > 1]
    if len(matrices) < 4:
        return None
    sources = Counter(
        other.split(".")[2] for name in matrices if (other := _copy_of(name, own[name], reference)).count(".") > 2
    )
    layer, count = sources.most_common(1)[0] if sources else ("", 0)
    if count == len(matrices):
        return f"{prefix[:-1]} has the weights of encoder.layer.{layer}"
    unrelated = [name for name in matrices if _cosine(own[name], reference[name]) < UNRELATED]
    if len(unrelated) == len(matrices) and not sources:
        return f"the weights of {prefix[:-1]} were not loaded: they are unrelated to the reference's{_look(own, names)}"
    return None


def describe(name: str, own: Mapping[str, Tensor], reference: Mapping[str, Tensor], config: Any) -> str:
    """In what way a parameter differs from the reference's."""
    mine, wanted = own[name].detach().double(), reference[name].detach().double()
    if mine.shape != wanted.shape:
        return f"{name} has the shape {tuple(mine.shape)} instead of {tuple(wanted.shape)}"
    if mine.dim() == 2 and mine.shape[0] == mine.shape[1] and _same(mine, wanted.T):
        return f"{name} is transposed"
    other = _copy_of(name, mine, reference)
    if other:
        swapped = other in own and _same(own[other], wanted)
        both = f"{_module(name)} and {_module(other)} are swapped"
        return both if swapped else f"{name} is that of {other}"
    for number, said in ((0.0, "zero"), (1.0, "one")):
        if bool((mine == number).all()):
            return f"{name} is all {said}: not loaded, or left out"
    rows = _rows(name, mine, wanted, config)
    if rows:
        return f"{name} {rows}"
    factor = float((mine * wanted).sum() / wanted.square().sum().clamp(min=1e-300))
    if factor and _same(mine, factor * wanted):
        return f"{name} is multiplied by {factor:.4g}{_known_factor(factor, config)}"
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(mine, wanted.float().to(dtype).double()):
            return f"{name} is rounded to {str(dtype).removeprefix('torch.')}"
    cosine = _cosine(mine, wanted)
    if cosine < UNRELATED and mine.dim() > 1:
        return f"{name} is unrelated to the reference's: not loaded{_look(own, [name])}"
    distance = float((mine - wanted).norm() / wanted.norm().clamp(min=1e-300))
    return f"{name} differs from the reference's by {distance:.1%} (cosine {cosine:.4f}): other weights"


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    eps = max(torch.finfo(x.dtype).eps for x in (a, b))
    bound = 2 * max(eps, 1e-7) * float(b.detach().abs().max()) if b.numel() else 0.0
    return bool((a.detach().double() - b.detach().double()).abs().max() <= bound) if b.numel() else True


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))


def _copy_of(name: str, tensor: Tensor, reference: Mapping[str, Tensor]) -> str:
    """Which other parameter of the reference this is; of none if all its numbers are one, as many biases' are."""
    if tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
        return ""
    others = (other for other, value in reference.items() if other != name and value.shape == tensor.shape)
    return next((other for other in others if _same(tensor, reference[other])), "")


def _rows(name: str, mine: Tensor, wanted: Tensor, config: Any) -> str:
    """What has happened to whole rows: of an embedding, or of an attention head."""
    if name.endswith("_embeddings.weight"):
        shifts = (shift for shift in (*range(1, 5), *range(-4, 0)) if abs(shift) < len(mine))
        for shift in shifts:
            kept = slice(max(shift, 0), len(mine) + min(shift, 0))
            if _same(mine[kept], wanted.roll(shift, 0)[kept]):
                return f"is shifted by {shift} row{'s' * (abs(shift) != 1)}: position offset"
    if config is None or ".attention." not in name or "LayerNorm" in name:
        return ""
    per_head = 0 if ".self." in name else 1  # heads are rows of query, key and value, and columns of the output
    if per_head >= mine.dim():
        return ""
    num_heads = config.num_attention_heads
    mine, wanted = (x.transpose(0, per_head).unflatten(0, (num_heads, -1)) for x in (mine, wanted))
    if _same(mine.flatten(0, 1), wanted.transpose(0, 1).flatten(0, 1)):
        return "has the channels of its heads interleaved"
    order = [next((j for j in range(num_heads) if _same(head, wanted[j])), None) for head in mine]
    if None not in order and order != list(range(num_heads)):
        return f"has its heads in another order: {', '.join(map(str, order))}"
    wrong = [index for index, source in enumerate(order) if source is None]
    if wrong and len(wrong) < num_heads:
        zero = all(bool((mine[index] == 0).all()) for index in wrong)
        return f"differs in head {', '.join(map(str, wrong))} only{', which is zero' if zero else ''}"
    return ""


def _known_factor(factor: float, config: Any) -> str:
    if config is None:
        return ""
    size = config.hidden_size // config.num_attention_heads
    known = {size**0.5: "the square root of the head size", size**-0.5: "the scale of the scores, 1 / sqrt(head size)",
             config.hidden_size**0.5: "the square root of the hidden size"}  # fmt: skip
    return next((f", {said}" for value, said in known.items() if abs(factor / value - 1) < 1e-4), "")


def _look(own: Mapping[str, Tensor], names: list[str]) -> str:
    """What values that were never loaded look like."""
    matrix = next(own[name].detach() for name in names if own[name].dim() > 1)
    biases = [own[name].detach() for name in names if name.endswith(".bias")]
    fresh = f" (standard deviation {float(matrix.std()):.2g}"
    return f"{fresh}{', biases 0' if biases and not any(bool(bias.any()) for bias in biases) else ''})"


def _module(name: str) -> str:
    return name.rpartition(".")[0]
