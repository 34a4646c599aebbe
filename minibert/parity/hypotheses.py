"""Usual faults of every formula in BERT: what would be wrong, and the value that it would give.

Shapes: B sequences of S cells, C channels in H heads of D, T real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minibert.parity.replay import Evidence, Formula, Replay

LOWEST = torch.finfo(torch.float32).min  # what many a mask is filled with
EPS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
ACTIVATIONS = {  # one name for each function
    "gelu": "GELU by erf", "gelu_new": "GELU by tanh", "quick_gelu": "GELU by sigmoid", "relu": "ReLU", "silu": "SiLU",
    "tanh": "tanh", "linear": "none", "leaky_relu": "leaky ReLU", "mish": "Mish", "relu2": "ReLU squared",
    "relu6": "ReLU6", "sigmoid": "sigmoid", "hardswish": "hard swish",
}  # fmt: skip

Hypothesis = tuple[str, Formula]  # what would be wrong, and the value that it would give


def hypotheses(point: str, evidence: Evidence, got: Tensor | None = None) -> Iterator[Hypothesis]:
    """Usual faults of the formula of one point; `got` is the candidate's value if it is known."""
    layer = ".".join(point.split(".")[:3]) if point.startswith("encoder.layer.") else ""
    part = point.removeprefix(f"{layer}.") if layer else point
    match part:
        case "embeddings.word_embeddings":
            yield from _word_faults(point)
        case "embeddings.token_type_embeddings":
            yield from _type_faults(point, evidence)
        case "embeddings.position_embeddings":
            yield from _position_faults(point, evidence)
        case "embeddings":
            yield from _norm_faults("embeddings.LayerNorm", Replay.sum_of_embeddings, evidence, got)
        case "attention.self.query" | "attention.self.key" | "attention.self.value":
            yield from _projection_faults(layer, part, evidence)
        case "attention.self.scores":
            yield from _score_faults(layer, point, evidence, got)
        case "attention.self.context":
            yield from _context_faults(layer, point, evidence)
        case "attention.output" | "output":
            yield from _residual_faults(layer, part, evidence, got)
        case "intermediate":
            yield from _activation_faults(f"{layer}.intermediate.dense", evidence)
        case "cls.predictions.transform":
            dense = "cls.predictions.transform.dense"
            yield from _norm_faults(f"{point}.LayerNorm", lambda r: r.activate(r.value(dense)), evidence, got)
            for said, formula in _activation_faults(dense, evidence):
                yield said, partial(lambda r, f: r.norm(f"{point}.LayerNorm", f(r)), f=formula)
        case "pooler":
            yield from _pooler_faults()
        case _ if part.endswith("dense"):
            yield from _linear_faults(point, _dense_input(layer, part), evidence)
        case _ if part.endswith("logits"):
            yield from _logit_faults(got)


def _dense_input(layer: str, part: str) -> Formula:
    """What goes into the Linear at a point."""
    source = {
        "attention.output.dense": f"{layer}.attention.self.context",
        "intermediate.dense": f"{layer}.attention.output",
        "output.dense": f"{layer}.intermediate",
    }.get(part)
    return lambda r: r.value(r.last_layer if source is None else source)


def _word_faults(point: str) -> Iterator[Hypothesis]:
    def scaled(r: Replay) -> Tensor:
        return r.formula(point) * math.sqrt(r.config.hidden_size)

    yield "word embeddings are multiplied by sqrt(hidden size)", scaled
    yield "word embeddings are left out", lambda r: torch.zeros_like(r.formula(point))
    yield (
        "the padding id's row is taken as zero",
        lambda r: r.formula(point).masked_fill((r.batch.ids == r.config.pad_token_id)[..., None], 0),
    )


def _type_faults(point: str, evidence: Evidence) -> Iterator[Hypothesis]:
    def table(r: Replay, ids: Tensor) -> Tensor:
        return r.parameter(f"{point}.weight")[ids]

    yield "token types are ignored: all are taken for 0", lambda r: table(r, torch.zeros_like(r.batch.types))
    yield "token type embeddings are left out", lambda r: torch.zeros_like(r.formula(point))
    last = evidence.config.type_vocab_size - 1
    yield "token types are the other way round", lambda r: table(r, last - r.batch.types)
    for kind in range(1, last + 1):
        said = f"token types are ignored: all are taken for {kind}"
        yield said, partial(lambda r, k: table(r, torch.full_like(r.batch.types, k)), k=kind)


def _position_faults(point: str, evidence: Evidence) -> Iterator[Hypothesis]:
    def table(r: Replay, positions: Tensor) -> Tensor:
        return r.parameter(f"{point}.weight")[positions]

    rows = evidence.config.max_position_embeddings
    for shift in (1, 2, -1, 3, 4):
        said = f"position offset: positions begin at {shift} instead of 0"
        yield said, partial(lambda r, k: table(r, (r.positions() + k).clamp(0, rows - 1)), k=shift)
        yield said, partial(lambda r, k: table(r, (r.positions() + k) % rows), k=shift)
    yield "position embeddings are left out", lambda r: torch.zeros_like(r.formula(point))
    yield "every token has position 0", lambda r: table(r, torch.zeros_like(r.positions()))

    def from_the_end(r: Replay) -> Tensor:
        return table(r, (r.batch.real.sum(1, keepdim=True) - 1 - r.positions()).clamp(min=0))

    def sines(r: Replay) -> Tensor:
        size = r.config.hidden_size
        steps = torch.arange(0, size, 2, dtype=torch.float64, device=r.batch.real.device)
        angles = r.positions()[..., None] * torch.exp(steps * (-math.log(10000.0) / size))
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :size]

    yield "positions count from the end", from_the_end
    yield "positions are sines and cosines instead of the table", sines


def _linear_faults(name: str, source: Formula, evidence: Evidence) -> Iterator[Hypothesis]:
    """Faults of x W^T + b, W being the parameter `name`.weight."""
    weight = evidence.parameters.get(f"{name}.weight")
    if weight is None:
        return
    has_bias = f"{name}.bias" in evidence.parameters

    def product(r: Replay, matrix: Tensor, other_bias: str = name) -> Tensor:
        return F.linear(source(r), matrix, r.parameter(f"{other_bias}.bias") if has_bias else None)

    if weight.shape[0] == weight.shape[1]:
        yield f"transposed weight: {name}.weight", lambda r: product(r, r.parameter(f"{name}.weight").T)
    if has_bias:
        yield f"the bias is missing: {name}.bias", lambda r: F.linear(source(r), r.parameter(f"{name}.weight"))
    for dtype in (torch.bfloat16, torch.float16):
        rounded = f"{name}.weight is rounded to {str(dtype).removeprefix('torch.')}"
        yield rounded, partial(lambda r, d: product(r, r.parameter(f"{name}.weight").to(d).double()), d=dtype)
    ends = name.split(".")[3:]
    for other, matrix in evidence.parameters.items():
        module = other.removesuffix(".weight")
        if other == module or module == name or matrix.shape != weight.shape or "embeddings" in module:
            continue
        same_place = module.split(".")[3:] == ends or module.split(".")[:3] == name.split(".")[:3]
        if same_place or len(ends) < 2:
            yield _exchanged(name, module), partial(lambda r, m: product(r, r.parameter(f"{m}.weight"), m), m=module)


def _exchanged(name: str, other: str) -> str:
    mine, theirs = name.rpartition(".")[2], other.rpartition(".")[2]
    if {mine, theirs} <= {"query", "key", "value"} and mine != theirs and name.split(".")[2] == other.split(".")[2]:
        return f"swapped {mine}/{theirs}: {name} has the weights of {other}"
    return f"{name} has the weights of {other}"


def _projection_faults(layer: str, part: str, evidence: Evidence) -> Iterator[Hypothesis]:
    name, index = f"{layer}.{part}", int(layer.split(".")[2])
    yield from _linear_faults(name, lambda r: r.layer_input(index), evidence)

    def normalised(r: Replay, norm: str) -> Tensor:
        return r.linear(name, r.norm(norm, r.layer_input(index)))

    for norm in (f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"):
        yield f"pre-norm: the layer's input is normalised by {norm} first", partial(normalised, norm=norm)

    def plainly(r: Replay, eps: float) -> Tensor:
        return r.linear(name, F.layer_norm(r.layer_input(index), (r.config.hidden_size,), eps=eps))

    for eps in (evidence.config.layer_norm_eps, *EPS):
        yield "pre-norm: the layer's input is normalised first, without weight and bias", partial(plainly, eps=eps)
    size = evidence.config.hidden_size // evidence.config.num_attention_heads
    yield "scale: 1 / sqrt(head size) is part of it already", lambda r: r.formula(name) / math.sqrt(size)
    yield "scale: it is multiplied by sqrt(head size)", lambda r: r.formula(name) * math.sqrt(size)

    def interleaved(r: Replay) -> Tensor:
        heads = r.config.num_attention_heads
        apart: Tensor = r.formula(name).unflatten(-1, (heads, -1))
        return apart.transpose(-1, -2).flatten(-2)

    yield "the channels of heads are interleaved: (head size, heads) instead of (heads, head size)", interleaved
    if index:
        before = f"encoder.layer.{index - 1}.attention.output"
        yield f"input: {before} instead of the layer before", lambda r: r.linear(name, r.value(before))


def _softmax(scores: Tensor, blocked: Tensor | None = None, fill: float = float("-inf")) -> Tensor:
    return (scores if blocked is None else scores.masked_fill(blocked, fill)).softmax(-1)


def _mask_faults(layer: str) -> Iterator[Hypothesis]:
    yield "mask: it is ignored, so that padding is attended to", lambda r: _softmax(r.raw_scores(layer))
    inverted = "mask: its polarity is inverted, so that padding is attended to and text is not"
    for fill in (float("-inf"), LOWEST, -1e9):
        yield inverted, partial(lambda r, f: _softmax(r.raw_scores(layer), r.open_keys(), f), f=fill)
    for low in (-1e4, -1e9):
        yield inverted, partial(lambda r, b: _softmax(r.raw_scores(layer) + r.open_keys() * b), b=low)
    yield (
        "mask: its 0 and 1 are added to the scores as they are",
        lambda r: _softmax(r.raw_scores(layer) + r.open_keys().double()),
    )
    yield "mask: the scores are multiplied by it", lambda r: _softmax(r.raw_scores(layer) * r.open_keys().double())
    yield (
        "mask: weights are zeroed after the softmax, and so do not add up to 1",
        lambda r: _softmax(r.raw_scores(layer)) * r.open_keys().double(),
    )

    def causal(r: Replay) -> Tensor:
        length = r.batch.real.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=r.batch.real.device).tril()
        return _softmax(r.raw_scores(layer), ~(seen & r.open_keys()))

    yield "mask: it is causal, so that no token sees those behind it", causal


def _score_faults(layer: str, point: str, evidence: Evidence, got: Tensor | None) -> Iterator[Hypothesis]:
    size = evidence.config.hidden_size // evidence.config.num_attention_heads

    def scaled(r: Replay, scale: float) -> Tensor:
        return _softmax(r.raw_scores(layer, scale), ~r.open_keys())

    scales = {
        "the scale 1 / sqrt(head size) is missing": 1.0,
        "scale: 1 / sqrt(hidden size) instead of 1 / sqrt(head size)": evidence.config.hidden_size**-0.5,
        "scale: 1 / head size instead of its square root, or applied twice": 1 / size,
        "scale: multiplied by sqrt(head size) instead of divided": size**0.5,
        "scale: 1 / sqrt(number of heads) instead of 1 / sqrt(head size)": evidence.config.num_attention_heads**-0.5,
    }
    for said, scale in scales.items():
        yield said, partial(scaled, scale=scale)
    yield from _mask_faults(layer)
    yield (
        "swapped query/key: the scores are those of keys to queries",
        lambda r: _softmax(r.raw_scores(layer).transpose(-1, -2), ~r.open_keys()),
    )
    yield "the softmax is missing", lambda r: r.raw_scores(layer).masked_fill(~r.open_keys(), float("-inf"))
    yield "the softmax is missing", lambda r: r.raw_scores(layer)

    def over(r: Replay, dim: int) -> Tensor:
        return r.raw_scores(layer).masked_fill(~r.open_keys(), LOWEST).softmax(dim)

    yield "the softmax is taken over the queries", partial(over, dim=-2)
    yield "the softmax is taken over the heads", partial(over, dim=1)
    yield from _head_faults(layer, point, evidence, got)


def _head_faults(layer: str, point: str, evidence: Evidence, got: Tensor | None) -> Iterator[Hypothesis]:
    num_heads = evidence.config.num_attention_heads

    def split(r: Replay, how: str) -> Tensor:
        parts = [r.value(f"{layer}.attention.self.{name}") for name in ("query", "key")]
        if how == "interleaved":
            query, key = (x.unflatten(-1, (-1, num_heads)).permute(0, 3, 1, 2) for x in parts)
        else:
            query, key = (x.reshape(len(x), num_heads, -1, x.shape[-1] // num_heads) for x in parts)
        return _softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), ~r.open_keys())

    yield (
        "heads: channels are split as (head size, heads) instead of (heads, head size)",
        partial(split, how="interleaved"),
    )
    yield "heads: (B, S, C) is reshaped to (B, H, S, D) without a transposition", partial(split, how="reshaped")
    if got is None:
        return
    wanted = evidence.reference.values[point].double()  # (T, H, S)
    distances = torch.cdist(got.transpose(0, 1).flatten(1), wanted.transpose(0, 1).flatten(1), p=math.inf)
    order = distances.argmin(1)
    if not torch.equal(order, torch.arange(num_heads, device=order.device)):
        listed = ", ".join(str(int(index)) for index in order)
        yield f"heads are in another order: {listed}", lambda r: r.formula(point)[:, order]
    for index in range(num_heads):
        mask = torch.arange(num_heads, device=got.device) == index
        yield (
            f"head {index} is switched off",
            partial(lambda r, m: r.formula(point).masked_fill(m[:, None, None], 0), m=mask),
        )


def _context_faults(layer: str, point: str, evidence: Evidence) -> Iterator[Hypothesis]:
    attention = f"{layer}.attention.self"

    def per_head(r: Replay) -> Tensor:  # (B, H, S, D)
        return r.heads(r.formula(point))

    yield (
        "heads: (B, H, S, D) is merged without a transposition",
        lambda r: per_head(r).reshape(*r.batch.real.shape, -1),
    )
    yield (
        "heads: channels are merged as (head size, heads) instead of (heads, head size)",
        lambda r: per_head(r).permute(0, 2, 3, 1).flatten(2),
    )
    for name in ("key", "query"):
        yield (
            f"swapped {name}/value: the {name}s are averaged",
            partial(
                lambda r, n: (
                    (r.value(f"{attention}.scores") @ r.heads(r.value(f"{attention}.{n}"))).transpose(1, 2).flatten(2)
                ),
                n=name,
            ),
        )
    yield (
        "the weights are transposed before they meet the values",
        lambda r: (
            (r.value(f"{attention}.scores").transpose(-1, -2) @ r.heads(r.value(f"{attention}.value")))
            .transpose(1, 2)
            .flatten(2)
        ),
    )

    def without(r: Replay, index: int) -> Tensor:
        off = torch.arange(r.config.num_attention_heads, device=r.batch.real.device) == index
        return per_head(r).masked_fill(off[:, None, None], 0).transpose(1, 2).flatten(2)

    def moved(r: Replay, shift: int) -> Tensor:
        return per_head(r).roll(shift, 1).transpose(1, 2).flatten(2)

    for index in range(evidence.config.num_attention_heads):
        yield f"head {index} is switched off", partial(without, index=index)
    for shift in range(1, evidence.config.num_attention_heads):
        yield f"heads are rolled by {shift}", partial(moved, shift=shift)
    yield "heads are in reverse order", lambda r: per_head(r).flip(1).transpose(1, 2).flatten(2)


def _norm_faults(norm: str, source: Formula, evidence: Evidence, got: Tensor | None) -> Iterator[Hypothesis]:
    """Faults of a normalisation with the parameters of `norm` over what `source` gives."""
    expected = evidence.config.layer_norm_eps
    guesses = set(EPS) - {expected}
    if got is not None:
        guesses |= _estimated_eps(norm, source, evidence, got)
    for eps in sorted(guesses):
        yield f"eps: about {eps:.2g} instead of {expected:g}", partial(lambda r, e: r.norm(norm, source(r), e), e=eps)
    weight, bias = f"{norm}.weight", f"{norm}.bias"

    def plain(r: Replay) -> Tensor:
        return F.layer_norm(source(r), (r.config.hidden_size,), eps=expected)

    yield "the normalisation is missing", source
    yield "weight and bias of the normalisation are left out", plain
    yield f"the bias of the normalisation is left out: {bias}", lambda r: plain(r) * r.parameter(weight)
    yield f"the weight of the normalisation is left out: {weight}", lambda r: plain(r) + r.parameter(bias)
    yield (
        "weight and bias of the normalisation are swapped",
        lambda r: plain(r) * r.parameter(bias) + r.parameter(weight),
    )

    def with_std(r: Replay, unbiased: bool, outside: float) -> Tensor:
        x = source(r)
        deviation: Tensor = x.std(-1, correction=int(unbiased), keepdim=True) + outside
        return (x - x.mean(-1, keepdim=True)) / deviation * r.parameter(weight) + r.parameter(bias)

    yield (
        "the normalisation divides by C - 1 instead of C (unbiased variance)",
        partial(with_std, unbiased=True, outside=expected),
    )
    for eps in (expected, 1e-6, 1e-5):
        yield (
            "eps: added to the standard deviation, not to the variance",
            partial(with_std, unbiased=False, outside=eps),
        )

    def root_mean_square(r: Replay) -> Tensor:
        x = source(r)
        size: Tensor = (x.square().mean(-1, keepdim=True) + expected).sqrt()
        return x / size * r.parameter(weight) + r.parameter(bias)

    yield "the normalisation does not subtract the mean (RMSNorm)", root_mean_square
    others = (name.removesuffix(".weight") for name in evidence.parameters if name.endswith("LayerNorm.weight"))
    for other in others:
        if other != norm:
            yield f"the normalisation is that of {other}", partial(lambda r, o: r.norm(o, source(r)), o=other)


def _estimated_eps(norm: str, source: Formula, evidence: Evidence, got: Tensor) -> set[float]:
    """The eps that makes a norm's output what it is: (out - bias) / weight is x - mean by sqrt(variance + eps)."""
    replay = Replay(evidence, norm.removesuffix(".LayerNorm"))
    try:
        x = source(replay)[evidence.batch.real]
    except KeyError:
        return set()
    weight, bias = replay.parameter(f"{norm}.weight"), replay.parameter(f"{norm}.bias")
    centred = x - x.mean(-1, keepdim=True)
    normed = (got - bias) / torch.where(weight == 0, torch.ones_like(weight), weight)
    ratio = (centred * normed).sum(-1) / normed.square().sum(-1).clamp(min=1e-300)  # the divisor, by least squares
    eps = float((ratio.square() - centred.square().mean(-1)).median())
    return {float(f"{eps:.2g}"), eps} if eps > 0 else set()


def _residual_faults(layer: str, part: str, evidence: Evidence, got: Tensor | None) -> Iterator[Hypothesis]:
    """Faults of LayerNorm(dense + residual)."""
    index, norm = int(layer.split(".")[2]), f"{layer}.{part}.LayerNorm"

    def dense(r: Replay) -> Tensor:
        return r.value(f"{layer}.{part}.dense")

    def residual(r: Replay) -> Tensor:
        return r.layer_input(index) if part == "attention.output" else r.value(f"{layer}.attention.output")

    def other(r: Replay) -> Tensor:  # the one that belongs to the other half of the layer
        return r.value(f"{layer}.attention.self.context") if part == "attention.output" else r.layer_input(index)

    yield "the residual connection is missing", lambda r: r.norm(norm, dense(r))
    yield (
        "the residual connection is added behind the normalisation, not before it",
        lambda r: r.norm(norm, dense(r)) + residual(r),
    )
    yield (
        "pre-norm: the residual sum is not normalised behind this half of the layer",
        lambda r: dense(r) + residual(r),
    )
    yield "the residual connection is added twice", lambda r: r.norm(norm, dense(r) + 2 * residual(r))
    yield "residual: another tensor is added than this half's input", lambda r: r.norm(norm, dense(r) + other(r))
    yield "residual: it is subtracted", lambda r: r.norm(norm, dense(r) - residual(r))
    yield "the projection is left out", lambda r: r.norm(norm, residual(r))
    yield from _norm_faults(norm, lambda r: dense(r) + residual(r), evidence, got)


def _activation_faults(dense: str, evidence: Evidence) -> Iterator[Hypothesis]:
    for name, said in ACTIVATIONS.items():
        if name != evidence.config.hidden_act:
            wrong = f"activation: {said} instead of {evidence.config.hidden_act}"
            yield wrong, partial(lambda r, n: r.activate(r.value(dense), n), n=name)


def _pooler_faults() -> Iterator[Hypothesis]:
    name = "pooler.dense"

    def pooled(r: Replay, x: Tensor) -> Tensor:
        return torch.tanh(r.linear(name, x))

    def last(r: Replay) -> Tensor:
        ends = r.batch.real.sum(1) - 1
        return r.value(r.last_layer)[torch.arange(len(ends), device=ends.device), ends]

    def mean(r: Replay) -> Tensor:
        real = r.batch.real[..., None]
        return (r.value(r.last_layer) * real).sum(1) / real.sum(1)

    yield "tanh is missing", lambda r: r.linear(name, r.first_tokens())
    yield "the last token is pooled instead of the first", lambda r: pooled(r, last(r))
    yield "the mean of the tokens is pooled instead of the first", lambda r: pooled(r, mean(r))
    yield (
        "the last cell, padding or not, is pooled instead of the first",
        lambda r: pooled(r, r.value(r.last_layer)[:, -1]),
    )
    yield (
        f"transposed weight: {name}.weight",
        lambda r: torch.tanh(F.linear(r.first_tokens(), r.parameter(f"{name}.weight").T, r.parameter(f"{name}.bias"))),
    )
    yield (
        f"the bias is missing: {name}.bias",
        lambda r: torch.tanh(F.linear(r.first_tokens(), r.parameter(f"{name}.weight"))),
    )
    yield "the first token is taken as it is, without pooler.dense", lambda r: r.first_tokens()
    for activation in ("gelu", "relu", "sigmoid"):
        yield (
            f"activation: {activation} instead of tanh",
            partial(lambda r, a: r.activate(r.linear(name, r.first_tokens()), a), a=activation),
        )


def _logit_faults(got: Tensor | None) -> Iterator[Hypothesis]:
    def result(r: Replay) -> Tensor:
        return r.formula(r.target)

    def without_bias(r: Replay) -> Tensor:
        name, x = r.result_input()
        return r.shaped(F.linear(x, r.parameter(f"{name}.weight")))

    def on_other_input(r: Replay, shift: int) -> Tensor:
        name, x = r.result_input()
        return r.shaped(r.linear(name, x.roll(shift, 1)))

    yield "the head's bias is missing", without_bias
    yield "the softmax is taken already: these are probabilities", lambda r: result(r).softmax(-1)
    yield "the logarithm of the softmax is taken already", lambda r: result(r).log_softmax(-1)
    yield "the sigmoid is taken already", lambda r: result(r).sigmoid()
    for shift, where in ((1, "before"), (-1, "behind")):
        yield f"every token has the logits of the one {where} it", partial(on_other_input, shift=shift)
    yield "the sign is wrong", lambda r: -result(r)
    if got is not None and got.dim() == 2 and got.shape[1] <= 1000:

        def reordered(r: Replay) -> Tensor:
            value = result(r)
            flat = value[r.batch.real] if value.shape[:2] == r.batch.real.shape else value
            return value[..., torch.cdist(got.T, flat.T).argmin(1)]

        yield "the labels are in another order", reordered
